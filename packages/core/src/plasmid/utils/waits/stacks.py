"""Describe the state of a process as text: waits, tasks of event loops, and stacks of threads."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from .ledger import LEDGER

LOOPS: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops of other threads whose tasks `describe_process` lists in addition to those of the running loop."""
MAX_TASKS = 200
IDLE_FILES = ("threading.py", "selectors.py", "queue.py", "concurrent/futures/thread.py", "ray/_private/worker.py")
"""File name suffixes of the innermost frame of a thread that waits for work."""


def describe_process() -> str:
    """Return waits, phases, stacks of threads, and tasks. Call it from an event loop or thread that responds."""
    parts = ["waits:", *(f"  {wait}" for wait in LEDGER.waits())]
    parts += ["phases:", *(f"  {phase}" for phase in LEDGER.phases())]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        parts += [f"thread {names.get(ident, ident)}:", "".join(traceback.format_stack(frame)).rstrip()]
    for loop in _loops():
        parts += describe_tasks(loop)
    return "\n".join(parts) + "\n"


def _loops() -> list[asyncio.AbstractEventLoop]:
    try:
        running = [asyncio.get_running_loop()]
    except RuntimeError:
        running = []
    return [*running, *(loop for loop in LOOPS if loop not in running)]


def describe_tasks(loop: asyncio.AbstractEventLoop) -> list[str]:
    """Return the stacks of the unfinished tasks of a loop, as lines."""
    try:
        tasks = [task for task in asyncio.all_tasks(loop) if not task.done()]
    except RuntimeError:  # another thread keeps starting and ending tasks
        return ["tasks: cannot be listed, since they change too quickly"]
    found = [f"{len(tasks)} tasks"]
    for task in tasks[:MAX_TASKS]:
        lines = [f"  {_show(frame)}" for frame in _frames(task.get_coro())]
        found += [f"task {task.get_name()}, innermost call last:", *lines]
    return found


def _frames(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine and of all that it awaits; `asyncio.Task.get_stack` has only one."""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)


def locate(thread: int | None) -> str:
    """Return the innermost call of a thread of this process, and the innermost one outside of libraries."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    return "" if frame is None else _place(frame)


def _place(frame: FrameType) -> str:
    inner, own = frame, frame
    while own.f_back is not None and _is_library(own.f_code.co_filename):
        own = own.f_back
    if _is_library(own.f_code.co_filename):
        own = inner
    places = dict.fromkeys((_show(inner), _show(own)))
    return ", called by ".join(places)


def _show(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _is_library(file: str) -> bool:
    return "site-packages" in file or file.startswith((sys.base_prefix, "<"))


def wait_until_grown(file: BinaryIO, size: int, *, timeout_s: float, quiet_s: float = 0.2) -> str:
    """Return the text appended to a file after ``size`` bytes, once it has not grown for ``quiet_s``; empty if none."""
    end, seen, since = time.monotonic() + timeout_s, size, time.monotonic()
    while time.monotonic() < end:
        now = os.fstat(file.fileno()).st_size
        if now != seen:
            seen, since = now, time.monotonic()
        elif seen > size and time.monotonic() - since >= quiet_s:
            break
        time.sleep(0.05)
    file.seek(size)
    return file.read().decode(errors="replace")


def locate_in_dump(dump: str) -> str:
    """Return the innermost call of a busy thread in a `faulthandler` dump; empty if all threads are idle."""
    for block in dump.split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.strip().startswith("File ")]
        if lines and (place := _read_frame(lines[0])) and not place[0].endswith(IDLE_FILES):
            return f"{place[2]} ({Path(place[0]).name}:{place[1]})"
    return ""


def _read_frame(line: str) -> tuple[str, str, str] | None:
    """Parse file, line and function of ``File "x.py", line 3 in f``."""
    head, _, function = line.rpartition(" in ")
    file, _, number = head.removeprefix('File "').partition('", line ')
    return (file, number, function) if number.isdigit() else None
