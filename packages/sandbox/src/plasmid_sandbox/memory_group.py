"""Control groups (version 2) that limit the total memory of a program's processes, where this user may create them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "plasmid-"
REMOVAL_S = 2.0
"""Time limit for killed processes to leave a group, in seconds."""
_numbers = itertools.count()


@contextmanager
def memory_group(num_bytes: int) -> Iterator[str | None]:
    """Create a control group with this limit. Yields its folder, or None if none can be created.

    All processes in the group are killed at the end.
    """
    parent = _parent()
    if parent is None:
        yield None
        return
    group = parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    group.mkdir()
    try:
        (group / "memory.max").write_text(str(num_bytes))
        with suppress(OSError):  # a kernel without swap accounting
            (group / "memory.swap.max").write_text("0")
        yield str(group)
    finally:
        _remove(group)


@cache
def _parent() -> Path | None:
    """Return the parent for new groups: this process's own or the one above, if it limits memory and is writable."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    except (OSError, StopIteration):
        return None
    for path in (ROOT / own, (ROOT / own).parent):
        if path.is_relative_to(ROOT) and _may_bound_memory(path):
            _remove_left(path)
            return path
    return None


def _may_bound_memory(path: Path) -> bool:
    try:
        if "memory" not in (path / "cgroup.subtree_control").read_text().split():
            return False
        trial = path / f"{PREFIX}{os.getpid()}-trial"
        trial.mkdir()
        trial.rmdir()
    except OSError:
        return False
    return os.access(path / "cgroup.procs", os.W_OK)


def _remove_left(path: Path) -> None:
    """Remove groups left behind by processes that were killed."""
    for group in path.glob(f"{PREFIX}*-*"):
        owner = group.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + REMOVAL_S
    with suppress(OSError):
        (group / "cgroup.kill").write_text("1")
    while True:
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until:
                return
            time.sleep(0.01)
