"""Landlock: permanent file access restrictions that an unprivileged process applies to itself and its children.

A process within a Landlock domain cannot trace processes outside of it. This also blocks `/proc/<pid>/mem`, `environ`
and `fd` of all other processes of its user.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

from .linux import PR_SET_NO_NEW_PRIVS, prctl, syscall

SYS_CREATE_RULESET, SYS_ADD_RULE, SYS_RESTRICT_SELF = 444, 445, 446
"""The same on all architectures."""
GET_VERSION, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
ALL_OF_FIRST = (1 << 13) - 1
"""The access rights of version 1."""
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2
DOMAIN, SIGNALS = 2, 6
"""Versions from which `enter_domain` isolates from other processes, and from signals to them."""


def version() -> int:
    """Return the Landlock version of this kernel; 0 if it is missing or not permitted."""
    if sys.platform != "linux":
        return 0
    try:
        return syscall(SYS_CREATE_RULESET, 0, 0, GET_VERSION)
    except OSError:
        return 0


def confine_files(readable: Sequence[str], writable: Sequence[str], devices: Sequence[str]) -> bool:
    """Restrict reading, writing, listing and executing to these files and folders. Returns False without Landlock."""
    found = version()
    if not found:
        return False
    newer = [REFER] * (found >= 2) + [TRUNCATE] * (found >= 3) + [IOCTL_DEV] * (found >= 5)
    rights = ALL_OF_FIRST | sum(newer)
    ruleset = _create(rights, (SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS) if found >= SIGNALS else 0, found)
    for paths, wanted in (
        (readable, EXECUTE | READ_FILE | READ_DIR),
        (writable, rights),
        (devices, READ_FILE | WRITE_FILE),
    ):
        for path in paths:
            _permit(ruleset, path, wanted)
    _enter(ruleset)
    return True


def enter_domain() -> bool:
    """Isolate from other processes without restricting files. Returns False if the kernel does not support it."""
    found = version()
    if found < DOMAIN:  # version 1 would forbid moving files between folders
        return False
    ruleset = _create(REFER, SCOPE_SIGNALS if found >= SIGNALS else 0, found)
    _permit(ruleset, "/", REFER)
    _enter(ruleset)
    return True


def _create(rights: int, scopes: int, found: int) -> int:
    size = 8 if found < 4 else 16 if found < 6 else 24
    attributes = struct.pack("QQQ", rights, 0, scopes)[:size]
    return syscall(SYS_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)


def _permit(ruleset: int, path: str, rights: int) -> None:
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):
                rights &= EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
            rule = struct.pack("=Qi", rights, descriptor)
            syscall(SYS_ADD_RULE, ruleset, PATH_BENEATH, ctypes.c_char_p(rule), 0)
        finally:
            os.close(descriptor)


def _enter(ruleset: int) -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(SYS_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
