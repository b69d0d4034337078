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
    """Client side. Starts the process immediately; importing reasoning-gym takes some seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**make_child_environment(), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )
        weakref.finalize(self, _stop, self._process)

    def families(self) -> list[str]:
        """Return the names of all usable families."""
        return [str(name) for name in self._request({})["families"]]

    def make(self, family: str, seed: int, options: Mapping[str, Any]) -> entries.Entry:
        """Create the entry of a seed. Raises `DataError`."""
        answer = self._request({"family": family, "seed": seed, "options": dict(options)})
        return entries.Entry(question=answer["question"], answer=answer["answer"])

    def _request(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
                ready = select.select([self._process.stdout], [], [], ANSWER_S)[0]
                line = self._process.stdout.readline() if ready else b""
            except BrokenPipeError:
                line = b""
        if not line:
            _stop(self._process)
            raise DataError(f"reasoning-gym: the process that generates prompts did not answer {dict(request)}")
        answer = json.loads(line)
        if "error" in answer:
            raise DataError(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End the process."""
        _stop(self._process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            with suppress(BrokenPipeError):  # data that was not sent is no longer needed
                pipe.close()


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
