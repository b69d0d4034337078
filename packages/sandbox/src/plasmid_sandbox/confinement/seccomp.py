"""System call filter (seccomp), assembled here because libseccomp's bindings need a system library."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .linux import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, check, libc, prctl
from .syscalls import ALLOWED

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000
AF_UNIX = 1
X32_BIT = 0x40000000

SIGNALS = ("kill", "tkill", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
METADATA = (
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat", "lchown"),
    *("utime", "utimes", "futimesat", "utimensat"),
)
FCNTL = (*range(8), *range(36, 39), 1030, 1032, 1034)
"""Commands of `fcntl` that programs may use: duplicates, flags, locks, the size of a pipe, seals. Others send signals
to other processes (`F_SETOWN`), make other processes wait (`F_SETLEASE`), or take memory (`F_SETPIPE_SZ`)."""
IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)
"""Requests of `ioctl` that programs must not use: `TIOCSTI` and `TIOCLINUX`, which type into a terminal, `FIOSETOWN`
and `SIOCSPGRP`, which do what `F_SETOWN` does."""
SCHEDULING = ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr")


@dataclass(frozen=True, slots=True)
class Rule:
    """Refuse a system call, or permit it with `ALLOW`, always or only if a test of one argument holds."""

    call: str
    action: int = REFUSE | errno.EPERM
    argument: int = 0
    test: Literal["always", "is", "not", "any-bit", "no-bit"] = "always"
    value: int = 0


def own_process_rules() -> list[Rule]:
    """Return rules against calls that change, signal or delay other processes of the same user."""
    return [
        Rule("clone", test="any-bit", value=CLONE_NAMESPACES),
        *(Rule(call, test="not", value=0) for call in ("prlimit64", *SCHEDULING, "setpriority")),
        Rule("setpriority", argument=1, test="not", value=0),
        Rule("ioprio_set", argument=0, test="not", value=1),
        Rule("ioprio_set", argument=1, test="not", value=0),
        *(Rule("fcntl", ALLOW, argument=1, test="is", value=command) for command in FCNTL),
        Rule("fcntl", REFUSE | errno.EINVAL),
        *(Rule("ioctl", argument=1, test="is", value=request) for request in IOCTL),
    ]


def sandbox_rules() -> list[Rule]:
    """Return rules for programs in their own namespaces: only processes and local sockets are allowed."""
    return [
        *own_process_rules(),
        # a network namespace does not cover every family: AF_VSOCK reaches the host of a virtual machine
        Rule("socket", REFUSE | errno.EACCES, test="not", value=AF_UNIX),
    ]


def worker_rules(*, network: bool) -> list[Rule]:
    """Return rules for a worker whose forks compute: no network unless `network`."""
    rules = own_process_rules()
    return rules if network else [*rules, Rule("socket", REFUSE | errno.EACCES)]


def single_process_rules(pid: int) -> list[Rule]:
    """Return additional rules for the process `pid`: no child processes, no signals to other processes."""
    return [
        Rule("clone", KILL, test="no-bit", value=CLONE_THREAD),
        *(Rule(call, KILL) for call in ("fork", "vfork")),
        *map(Rule, SIGNALS),
        Rule("tgkill", test="not", value=pid),
    ]


def metadata_rules() -> list[Rule]:
    """Return rules that protect metadata where Landlock does not: changes of modes, owners and times have no effect.

    They do not fail, because copying a file makes them, too.
    """
    return [*(Rule(call, REFUSE) for call in METADATA), *map(Rule, ATTRIBUTES)]


def is_supported() -> bool:
    """Return whether the system calls of this machine's architecture are known."""
    return sys.platform == "linux" and platform.machine() in ARCHITECTURES and sys.byteorder == "little"


def program(rules: Iterable[Rule], machine: str, *, others: Literal["listed", "all"] = "listed") -> bytes:
    """Compile the rules to instructions of the classic Berkeley packet filter.

    Calls without a matching rule are permitted if `ALLOWED` lists them; others fail as if the kernel did not have them.
    With ``others="all"``, for a filter added to an installed one, all calls without a matching rule are permitted.
    """
    column = list(ARCHITECTURES).index(machine)
    load_nr, other_architecture = _load(0), [_load(4), _jump(0x15, ARCHITECTURES[machine], 1, 0), _return(KILL)]
    code = [*other_architecture, load_nr]
    if machine == "x86_64":
        code += [_jump(0x35, X32_BIT, 0, 1), _return(KILL)]
    for rule in rules:
        number = ALLOWED[rule.call][column]
        if number is None:
            continue
        if rule.test == "always":
            code += [_jump(0x15, number, 0, 1), _return(rule.action)]
            continue
        opcode = 0x15 if rule.test in ("is", "not") else 0x45
        inverse = rule.test in ("not", "no-bit")
        low_word = _load(16 + 8 * rule.argument)
        test = _jump(opcode, rule.value, int(inverse), int(not inverse))
        code += [_jump(0x15, number, 0, 4), low_word, test, _return(rule.action), load_nr]
    if others == "all":
        return b"".join([*code, _return(ALLOW)])
    for first, last in _ranges(number for numbers in ALLOWED.values() if (number := numbers[column]) is not None):
        code += [_jump(0x35, first, 0, 2), _jump(0x25, last, 1, 0), _return(ALLOW)]
    return b"".join([*code, _return(REFUSE | errno.ENOSYS)])


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group consecutive numbers into ranges of first and last."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def install(rules: Iterable[Rule], *, others: Literal["listed", "all"] = "listed") -> None:
    """Permanently filter this thread and its children. With several filters, the strictest applies to each call."""
    code = program(rules, platform.machine(), others=others)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    zero = ctypes.c_ulong(0)
    filter_ = ctypes.c_ulong(ctypes.addressof(header))
    check(libc().prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), filter_, zero, zero), "seccomp")


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _return(action: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, action)
