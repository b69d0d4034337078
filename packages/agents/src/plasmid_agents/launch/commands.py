"""Programs as agents: the prompt on standard input, the server in environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from .task import AgentFailed, Result, Task

LONGEST = 1 << 20
"""Bytes of standard output that count as the answer: the last ones."""
ULIMIT_BLOCK = 512
"""Bytes of a block in the shell's `ulimit -f`."""


def search_path() -> str:
    """Where programs are looked for: beside the run's own Python first, as in an activated environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def check_command(command: Sequence[str]) -> None:
    """Raises `ValueError` if there is no such program."""
    if shutil.which(command[0], path=search_path()) is None:
        raise ValueError(f"no such program: {command[0]}")


async def run_command(
    command: Sequence[str], task: Task, environment: Mapping[str, str], *, max_file_bytes: int
) -> Result:
    """Run the program once, in this environment and what the task adds; what it prints is its answer.

    No file that it writes grows beyond ``max_file_bytes``, its output included. Raises `AgentFailed` if it does not
    end with code 0. If this is cancelled, the program is killed with all that it started.
    """
    with tempfile.TemporaryDirectory(prefix="plasmid-agent-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for file, text in (("prompt.txt", task.prompt), ("task.json", task.document())):
            (folder / file).write_text(text, encoding="utf-8")
        files = {"PLASMID_PROMPT_FILE": str(folder / "prompt.txt"), "PLASMID_TASK_FILE": str(folder / "task.json")}
        # output goes to files without a name: under one, the program could put a pipe, a device or a link
        with (
            (folder / "prompt.txt").open("rb") as given,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
        ):
            process = await asyncio.create_subprocess_exec(
                *limited(command, max_file_bytes),
                stdin=given,
                stdout=output,
                stderr=errors,
                env={**environment, "PATH": search_path(), **task.environment(), **files},
                start_new_session=True,
            )
            try:
                code = await process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            out, err = _tail(output), _tail(errors)
    if code == -signal.SIGXFSZ:
        raise AgentFailed(f"{command[0]} wrote a file of more than workflow.max_file_bytes = {max_file_bytes}")
    if code != 0:
        last = err.strip().splitlines()[-1:] or out.strip().splitlines()[-1:]
        raise AgentFailed(f"{command[0]} ended with code {code}: {' '.join(last)[-300:] or 'it printed nothing'}")
    return Result(answer=out.strip() or None)


def limited(command: Sequence[str], max_file_bytes: int) -> list[str]:
    """The command, started by a shell that lowers the limit on the size of files first."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    allowed = max_file_bytes if hard == resource.RLIM_INFINITY else min(max_file_bytes, hard)
    return ["/bin/sh", "-c", 'ulimit -f "$0" && exec "$@"', str(allowed // ULIMIT_BLOCK), *command]


def _tail(file: BinaryIO) -> str:
    """The last `LONGEST` bytes of a file, as text."""
    descriptor = file.fileno()
    start = max(0, os.fstat(descriptor).st_size - LONGEST)
    return os.pread(descriptor, LONGEST, start).decode("utf-8", errors="replace")
