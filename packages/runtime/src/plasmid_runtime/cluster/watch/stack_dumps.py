"""Request the stacks of other processes; for processes that do not write them, read their state from the kernel."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import psutil
from plasmid.protocols import ProcessState
from plasmid.utils.log_files import STACKS_MEMORY, STACKS_SIGNAL
from plasmid.utils.waits.stacks import locate_in_dump, wait_until_grown

DUMP_S = 3.0
"""Maximum time for processes to write their stacks, in seconds."""
MIN_STACKS_S = 0.5
"""Minimum time to read the stacks of each of several processes, in seconds."""
CONDITIONS = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a debugger",
    psutil.STATUS_ZOMBIE: "ended",
    psutil.STATUS_DEAD: "ended",
    psutil.STATUS_DISK_SLEEP: "waiting for a disk or a device",
}
STATUS_LINES = ("State:", "PPid:", "Threads:", "VmRSS:", "VmSwap:", "SigBlk:", "SigCgt:")
MAX_THREADS = 100


def describe_condition(process: psutil.Process) -> str:
    """Return the problem that the state of a process indicates; empty if there is none."""
    return CONDITIONS.get(process.status(), "")


def inspect_children(children: Iterable[psutil.Process]) -> tuple[tuple[ProcessState, ...], list[str]]:
    """Return the states of server processes, which can write their stacks, and a line for each other process."""
    servers: list[tuple[psutil.Process, str, str, Path]] = []
    others = []
    for child in children:
        try:
            memory, name, condition = find_stacks_file(child.pid), child.name(), describe_condition(child)
            if memory is None:
                command = " ".join(child.cmdline())[:200]
                others.append(f"{child.pid} {child.status()}, in the kernel at {_waits_at(child.pid)}: {command}")
            else:
                servers.append((child, name, condition, memory))
        except psutil.Error:
            others.append(f"{child.pid}: ended")
    dumps = dump_stacks({child.pid: memory for child, _, _, memory in servers})
    states = []
    for child, name, condition, _ in servers:
        dump = dumps[child.pid]
        found = dump or f"process {child.pid} ({name}) writes no stacks\n{describe_kernel_state(child.pid)}"
        problem = condition or ("" if dump else "not responding")
        position = _main_position(dump) if problem else ""  # all threads of an idle server wait somewhere
        states.append(ProcessState(name=name, pid=child.pid, condition=problem, position=position, stacks=found))
    return tuple(states), others


def _main_position(dump: str) -> str:
    """Return the position of the main thread, whose stack is the last, or of another busy thread."""
    return locate_in_dump("\n\n".join(reversed(dump.split("\n\n"))))


def find_stacks_file(pid: int) -> Path | None:
    """Return the file in memory to which a process writes its stacks on request; None if it has none."""
    if not _catches(pid, STACKS_SIGNAL):
        return None
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(link).startswith(f"/memfd:{STACKS_MEMORY}{pid} "):
                    return link
    return None


def dump_stacks(files: Mapping[int, Path]) -> dict[int, str]:
    """Make processes write the stacks of all threads with `faulthandler` to their files, and return them by id.

    Continues stopped processes. The text of a process that does not write is empty.
    """
    dumps = dict.fromkeys(files, "")
    with ExitStack() as stack:
        opened: dict[int, BinaryIO] = {}  # before the signal, as the file of a process that ends meanwhile disappears
        for pid, file in files.items():
            with suppress(OSError):
                if _catches(pid, STACKS_SIGNAL):
                    opened[pid] = stack.enter_context(file.open("rb"))
        sizes = {pid: os.fstat(reader.fileno()).st_size for pid, reader in opened.items()}
        for pid in opened:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, STACKS_SIGNAL)
                os.kill(pid, signal.SIGCONT)
        end = time.monotonic() + DUMP_S
        for pid, reader in opened.items():
            dumps[pid] = wait_until_grown(reader, sizes[pid], timeout_s=max(MIN_STACKS_S, end - time.monotonic()))
    return dumps


def describe_kernel_state(pid: int) -> str:
    """Return the kernel's information on a process as lines: its state, and the position of each waiting thread."""
    lines = [line for line in _read(Path(f"/proc/{pid}/status")).splitlines() if line.startswith(STATUS_LINES)]
    with suppress(OSError):
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir())[:MAX_THREADS]:
            stack = _read(thread / "stack").splitlines() or ["kernel stack not readable"]
            waits_at = _waits_at(int(thread.name))
            lines += [f"thread {thread.name} ({_read(thread / 'comm').strip()}): in the kernel at {waits_at}"]
            lines += [f"  {line}" for line in stack]
    return "\n".join(lines) or "the process has ended"


def _waits_at(pid: int) -> str:
    """Return the kernel function in which a process or thread waits."""
    found = _read(Path(f"/proc/{pid}/wchan")).strip()
    return found if found not in ("", "0") else "no named function"


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _catches(pid: int, number: signal.Signals) -> bool:
    """Return True if a process handles a signal that would otherwise kill it."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
