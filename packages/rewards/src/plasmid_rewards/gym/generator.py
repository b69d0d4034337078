"""A process that creates entries, with a line-based JSON protocol."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from plasmid.errors import DataError, PlasmidError
from plasmid.utils.child_environment import make_child_environment

from . import entries

BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from plasmid_rewards.gym.generator import main; main()"
ANSWER_S = 120.0
"""Time limit for one entry, in seconds; the slowest families take one or two."""


class Generator:
    """Client side. All open clients of this Python process use one generating process, because importing reasoning-gym
    takes seconds and over 100 MB. The first one starts it."""

    def __init__(self) -> None:
        self._process = _acquire()
        self._release = weakref.finalize(self, _release, self._process)

    def families(self) -> list[str]:
        """Return the names of all usable families."""
        return [str(name) for name in self._process.request({})["families"]]

    def make(self, family: str, seed: int, options: Mapping[str, Any]) -> entries.Entry:
        """Create the entry of a seed. Raises `DataError`."""
        answer = self._process.request({"family": family, "seed": seed, "options": dict(options)})
        return entries.Entry(question=answer["question"], answer=answer["answer"])

    def close(self) -> None:
        """End the process, unless other clients are open."""
        self._release()


class _Process:
    """The generating process."""

    def __init__(self) -> None:
        self.clients = 0
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**make_child_environment(), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )

    def request(self, request: Mapping[str, Any]) -> Any:
        """Send one request and return its answer. Raises `DataError`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                ready = select.select([self._process.stdout], [], [], ANSWER_S)[0]
                line = self._process.stdout.readline() if ready else b""
            except (BrokenPipeError, ValueError):  # it has ended, or another client has stopped it
                line = b""
            if not line:
                self.stop()
        if not line:
            raise DataError(f"reasoning-gym: the process that generates prompts did not answer {dict(request)}")
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(str(answer["error"]))
        return answer

    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):  # data that was not sent is no longer needed
                    pipe.close()


_sharing = threading.RLock()  # a client may be freed, which releases the process, while this thread holds it
_shared: _Process | None = None


def _acquire() -> _Process:
    """Return the shared process; start it unless it runs."""
    global _shared
    with _sharing:
        if (process := _shared) is not None:
            process.clients += 1  # before anything that may free another client, whose release would end the process
            if process.is_running():
                return process
            _release(process)
        process = _shared = _Process()
        process.clients = 1
        return process


def _release(process: _Process) -> None:
    """End the process if this was its last client."""
    global _shared
    with _sharing:
        process.clients -= 1
        if process.clients == 0:
            process.stop()
            if process is _shared:
                _shared = None


def main() -> None:
    """Server side: answer each JSON line with one JSON line until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep output of other packages out of the answers
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if not request:
            return {"families": entries.families()}
        entry = entries.make(request["family"], request["seed"], request["options"])
        return {"question": entry.question, "answer": entry.answer}
    except PlasmidError as error:
        return {"error": str(error)}
