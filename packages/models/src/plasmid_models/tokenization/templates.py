"""Render Jinja templates in a subprocess with limits on time and memory."""

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

from plasmid.errors import one_line
from plasmid.utils.child_environment import make_child_environment
from plasmid.utils.messages import ConnectionClosedError, LateMessageError, MessageTooLongError, receive, send

TIMEOUT_S = 20.0
"""Maximum time to render one conversation; most take less than a millisecond."""
MAX_RENDERED_BYTES = 64 << 20
"""Maximum size of one rendered conversation, in bytes."""


class RenderError(Exception):
    """The template rejected the messages or exceeded a limit."""


class Renderer:
    """Renders one conversation at a time in a subprocess that starts with the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._known: dict[tuple[str, bool], int] = {}

    def render(self, source: str, arguments: dict[str, Any], *, strict: bool = False) -> str:
        """Return the rendered text. Raises `RenderError`, with ``strict`` also for undefined variables."""
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            key = (source, strict)
            is_new = key not in self._known
            number = self._known.setdefault(key, len(self._known))
            try:
                send(process.stdin.fileno(), pickle.dumps((number, key if is_new else None, arguments)))
                answer = receive(process.stdout.fileno(), TIMEOUT_S, longest=MAX_RENDERED_BYTES)
            except LateMessageError:
                self._end()
                raise RenderError(f"it does not finish within {TIMEOUT_S:g} s") from None
            except MessageTooLongError:
                self._end()
                raise RenderError(f"its output exceeds {MAX_RENDERED_BYTES >> 20} MiB") from None
            except ConnectionClosedError:
                self._end()
                raise RenderError("its process has ended; it may need too much memory") from None
            except BaseException:
                self._end()  # else the next request would read this one's answer
                _check_sendable(arguments)
                raise
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != b"=":
            raise RenderError(text)
        return text

    def _start(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # after a fork: the subprocess belongs to the parent
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self._known.clear()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=make_child_environment(),
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        """Stop the subprocess; the next conversation starts a new one."""
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


def _check_sendable(arguments: dict[str, Any]) -> None:
    """Raise a `RenderError` that names the first argument that cannot be pickled."""
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # noqa: BLE001  boundary: objects of users' code
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise RenderError(f"{name} ({kind}) cannot be sent to its process: {one_line(error)}") from None


RENDERER = Renderer()
atexit.register(RENDERER.close)


class RemoteTemplate:
    """Stand-in for the compiled Jinja template that transformers expects."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, **arguments: Any) -> str:
        """Return the rendered text. Raises `RenderError`."""
        return RENDERER.render(self._source, arguments)


def render_templates_in_subprocess() -> None:
    """Make transformers render chat templates in the subprocess instead of in this process."""
    from transformers.utils import chat_template_utils

    assert hasattr(chat_template_utils, "_compile_jinja_template"), "transformers has moved this function"
    vars(chat_template_utils)["_compile_jinja_template"] = RemoteTemplate
