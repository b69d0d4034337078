"""System calls that Python's standard library lacks, through ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Mapping
from functools import cache

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
SIGKILL = 9
SYS = {"pivot_root": {"x86_64": 155, "aarch64": 41}, "capset": {"x86_64": 126, "aarch64": 91}}
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
"""The same on all architectures."""
CAPABILITY_VERSION_3 = 0x20080522


@cache
def libc() -> ctypes.CDLL:
    """The C library, with errno."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """The result of a C call, or `OSError` that says what failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0) -> None:
    """Set one attribute of this process."""
    zero = ctypes.c_ulong(0)
    check(libc().prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option})")


def die_with_parent() -> None:
    """Be killed when the parent ends. A change of user ids undoes this."""
    if sys.platform == "linux":
        prctl(PR_SET_PDEATHSIG, SIGKILL)


def unshare(flags: int) -> None:
    """Move into new namespaces."""
    check(libc().unshare(flags), "unshare")


def syscall(name: str | int, *args: object) -> int:
    """A system call that the C library may have no name for."""
    number = SYS[name][platform.machine()] if isinstance(name, str) else name
    long = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return check(libc().syscall(ctypes.c_long(number), *long), f"system call {name}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """mount(2)."""
    texts = [ctypes.c_char_p(text.encode() if text else None) for text in (source, target, kind)]
    check(libc().mount(*texts, ctypes.c_ulong(flags), ctypes.c_char_p(options.encode())), f"mount {kind} on {target}")


def drop_capabilities() -> None:
    """Give up every capability. Whether starting a program may give one is up to `no_new_privs`."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    syscall("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def empty_bounding_set() -> None:
    """Give up the way to get a capability by starting a program."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break  # past the last one that this kernel has, or not ours to drop


def set_limits(limits: Mapping[str, int]) -> None:
    """Lower resource limits, soft and hard: ``{"AS": bytes, "CPU": seconds, ...}``."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
