"""Render chat templates in a process of its own, which is ended if it takes too long or too much memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from plasmid.utils.child_environment import child_environment
from plasmid.utils.messages import Closed, Late, TooLong, receive, send

TIMEOUT_S = 20.0
"""Longest time for one conversation; usual ones take less than a millisecond."""
LONGEST = 64 << 20
"""Bytes of one rendered conversation."""


class RenderError(Exception):
    """The template refuses the messages, or has to be stopped."""


class Renderer:
    """Renders in one process, one conversation at a time. It starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._known: dict[str, int] = {}

    def render(self, source: str, arguments: dict[str, Any]) -> str:
        """The text. Raises `RenderError`."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            is_new = source not in self._known
            number = self._known.setdefault(source, len(self._known))
            try:
                send(process.stdin.fileno(), pickle.dumps((number, source if is_new else None, arguments)))
                answer = receive(process.stdout.fileno(), TIMEOUT_S, longest=LONGEST)
            except Late:
                self._end()
                raise RenderError(f"it does not end within {TIMEOUT_S:g} s") from None
            except TooLong:
                self._end()
                raise RenderError(f"it makes a text of more than {LONGEST >> 20} MiB") from None
            except Closed:
                self._end()
                raise RenderError("its process has ended; it may need too much memory") from None
            except BaseException:
                self._end()  # its answer would be taken for that of the next request
                raise
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != b"=":
            raise RenderError(text)
        return text

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # a fork must not talk to the process of another one
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self._known.clear()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=child_environment(),
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        """End the process; another one starts with the next conversation."""
        if self._owner == os.getpid():
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()


RENDERER = Renderer()
atexit.register(RENDERER.close)


class RemoteTemplate:
    """What transformers takes for a compiled template."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, **arguments: Any) -> str:
        """The text. Raises `RenderError`."""
        return RENDERER.render(self._source, arguments)


def render_templates_in_subprocess() -> None:
    """Have transformers render no chat template in this process."""
    from transformers.utils import chat_template_utils

    assert hasattr(chat_template_utils, "_compile_jinja_template"), "upstream has another place for it now"
    vars(chat_template_utils)["_compile_jinja_template"] = RemoteTemplate
