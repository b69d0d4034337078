"""Programs as agents: the prompt comes on standard input, the server's address in environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from plasmid.utils.safe_files import temporary_folder
from plasmid_sandbox.confinement.supervisor import supervisor_command

from .task import AgentFailed, Result, Task

MAX_ANSWER_BYTES = 1 << 20
"""Maximum size of the answer in bytes, taken from the end of standard output."""
END_S = 15.0
"""Time limit for a cancelled program to end, in seconds."""


def find_search_path() -> str:
    """Return the search path for programs, which starts with the folder of the run's Python, as in an activated
    environment."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def check_command(command: Sequence[str]) -> None:
    """Raise `ValueError` if there is no such program."""
    if shutil.which(command[0], path=find_search_path()) is None:
        raise ValueError(f"no such program: {command[0]}")


async def run_command(
    command: Sequence[str], task: Task, environment: Mapping[str, str], *, max_file_bytes: int, confined: bool
) -> Result:
    """Run the program once, in this environment plus the task's variables; its output is its answer.

    No file that it writes, including its output, grows beyond ``max_file_bytes``. Raises `AgentFailed` if the exit code
    is not 0. When it ends, or this call is cancelled, everything that it started is killed.
    """
    with temporary_folder("plasmid-agent-") as folder:
        for file, text in (("prompt.txt", task.prompt), ("task.json", task.document())):
            (folder / file).write_text(text, encoding="utf-8")
        files = {"PLASMID_PROMPT_FILE": str(folder / "prompt.txt"), "PLASMID_TASK_FILE": str(folder / "task.json")}
        # output goes to unnamed files: a name could be replaced by a pipe, a device or a link
        with (
            (folder / "prompt.txt").open("rb") as given,
            tempfile.TemporaryFile() as output,
            tempfile.TemporaryFile() as errors,
        ):
            running = await SupervisedProcess.start(
                command,
                max_file_bytes=max_file_bytes,
                confined=confined,
                stdin=given,
                stdout=output,
                stderr=errors,
                env={**environment, "PATH": find_search_path(), **task.environment(), **files},
            )
            try:
                code = await running.process.wait()
            finally:
                await running.end()
            out, err = _tail(output), _tail(errors)
    if code == -signal.SIGXFSZ:
        raise AgentFailed(f"{command[0]} wrote a file larger than workflow.max_file_bytes = {max_file_bytes}")
    if code != 0:
        last = err.strip().splitlines()[-1:] or out.strip().splitlines()[-1:]
        raise AgentFailed(f"{command[0]} exited with code {code}: {' '.join(last)[-300:] or 'no output'}")
    return Result(answer=out.strip() or None)


class SupervisedProcess:
    """A program under a supervisor, which kills everything that the program started when it ends."""

    def __init__(self, process: asyncio.subprocess.Process, keep: int) -> None:
        self.process, self._keep = process, keep

    @staticmethod
    async def start(
        command: Sequence[str], *, max_file_bytes: int, confined: bool, **options: Any
    ) -> SupervisedProcess:
        """Start the program; ``options`` are arguments of `asyncio.create_subprocess_exec`."""
        stop, keep = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *supervisor_command(command, stop, limits={"FSIZE": max_file_bytes}, confined=confined),
                pass_fds=(stop,),
                start_new_session=True,
                **options,
            )
        except BaseException:
            os.close(keep)
            raise
        finally:
            os.close(stop)
        return SupervisedProcess(process, keep)

    def stop(self) -> None:
        """Tell the supervisor to end; readers of the program's output see its end. Can be called repeatedly."""
        keep, self._keep = self._keep, -1
        if keep >= 0:
            os.close(keep)

    async def end(self) -> None:
        """End the program and everything that it started. Can be called repeatedly, but only by one task."""
        self.stop()
        if self.process.stdout is not None:
            with contextlib.suppress(ValueError):
                while await self.process.stdout.read(1 << 16):  # with a full pipe, `wait` would never return
                    pass
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), END_S)


def _tail(file: BinaryIO) -> str:
    """Return the last `MAX_ANSWER_BYTES` bytes of a file as text."""
    descriptor = file.fileno()
    start = max(0, os.fstat(descriptor).st_size - MAX_ANSWER_BYTES)
    return os.pread(descriptor, MAX_ANSWER_BYTES, start).decode("utf-8", errors="replace")
