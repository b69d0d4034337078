"""System calls that Python's standard library lacks, through ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SIGKILL = 9
SYS = {
    "pivot_root": {"x86_64": 155, "aarch64": 41},
    "capget": {"x86_64": 125, "aarch64": 90},
    "capset": {"x86_64": 126, "aarch64": 91},
}
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
"""The same on all architectures."""
CAPABILITY_VERSION_3 = 0x20080522
CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON = 19, 21, 38


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, with errno."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Return the result of a C call. Raises `OSError` naming what failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """Set one attribute of this process."""
    zero = ctypes.c_ulong(0)
    check(libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option})")


def die_with_parent() -> None:
    """Have this process killed when its parent ends. A change of user ids undoes this."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, SIGKILL)


def unshare(flags: int) -> None:
    """Move into new namespaces."""
    check(libc().unshare(flags), "unshare")


def syscall(name: str | int, *args: object) -> int:
    """Make a system call for which the C library may have no wrapper."""
    number = SYS[name][platform.machine()] if isinstance(name, str) else name
    long = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return check(libc().syscall(ctypes.c_long(number), *long), f"system call {name}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    texts = [ctypes.c_char_p(text.encode() if text else None) for text in (source, target, kind)]
    check(libc().mount(*texts, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode())), f"mount {kind} on {target}")


def drop_capabilities() -> None:
    """Drop every capability. `no_new_privs` decides whether executing a program may grant any."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def drop_tracing() -> None:
    """Drop the capabilities with which root can read any process's memory regardless of Landlock."""
    header, masks = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    syscall("capget", ctypes.byref(header), ctypes.byref(masks))
    for capability in (CAP_SYS_PTRACE, CAP_SYS_ADMIN, CAP_PERFMON):
        for kind in range(3):  # effective, permitted, inheritable
            masks[capability // 32 * 3 + kind] &= ~(1 << capability % 32)
    syscall("capset", ctypes.byref(header), ctypes.byref(masks))


def empty_bounding_set() -> None:
    """Empty the bounding set, so that executing a program grants no capabilities."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # beyond the kernel's last capability, or not permitted to drop


def set_limits(limits: Mapping[str, int]) -> None:
    """Lower soft and hard resource limits: ``{"AS": bytes, "CPU": seconds, ...}``."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def end_children(limit_s: float) -> bool:
    """Kill all children, including adopted ones. Returns False if some are left after ``limit_s`` seconds.

    For a subreaper (`PR_SET_CHILD_SUBREAPER`) these are all descendants, whatever process group or session they moved
    to, because it adopts orphans.
    """
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        time.sleep(1e-4)
    return False


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(number) for number in file.read().split()]
    except OSError:
        return []
