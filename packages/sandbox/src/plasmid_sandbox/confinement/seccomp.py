"""A filter of system calls (seccomp), assembled here: libseccomp and its bindings need a library of the system."""

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
ATTRIBUTES = ("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr")


@dataclass(frozen=True, slots=True)
class Rule:
    """Refuse a system call, or only where a test of one argument holds."""

    call: str
    action: int = REFUSE | errno.EPERM
    argument: int = 0
    test: Literal["always", "not", "any-bit", "no-bit"] = "always"
    value: int = 0


def sandbox_rules() -> list[Rule]:
    """For programs in namespaces of their own: processes and local sockets are theirs, nothing else is."""
    return [
        Rule("clone", test="any-bit", value=CLONE_NAMESPACES),
        # a network namespace does not bound every family: AF_VSOCK reaches the host of a virtual machine
        Rule("socket", REFUSE | errno.EACCES, test="not", value=AF_UNIX),
        Rule("prlimit64", test="not", value=0),
    ]


def worker_rules(*, network: bool) -> list[Rule]:
    """For a process whose forks compute: no network unless `network`."""
    rules = [Rule("prlimit64", test="not", value=0), Rule("clone", test="any-bit", value=CLONE_NAMESPACES)]
    return rules if network else [*rules, Rule("socket", REFUSE | errno.EACCES)]


def single_process_rules(pid: int) -> list[Rule]:
    """For the process `pid`, in addition to others: no processes but itself, no signals to others."""
    return [
        Rule("clone", KILL, test="no-bit", value=CLONE_THREAD),
        *(Rule(call, KILL) for call in ("fork", "vfork")),
        *map(Rule, SIGNALS),
        Rule("tgkill", test="not", value=pid),
    ]


def metadata_rules() -> list[Rule]:
    """Keep files as they are where Landlock does not: changes of modes, owners and times are done without effect.

    They do not fail, as copying a file makes them, too.
    """
    return [*(Rule(call, REFUSE) for call in METADATA), *map(Rule, ATTRIBUTES)]


def supported() -> bool:
    """True if this machine's system calls are known here."""
    return sys.platform == "linux" and platform.machine() in ARCHITECTURES and sys.byteorder == "little"


def program(rules: Iterable[Rule], machine: str, *, others: Literal["listed", "all"] = "listed") -> bytes:
    """The rules as instructions of the classic Berkeley packet filter.

    Calls without a rule that applies are permitted if they are listed in `ALLOWED` (or all are, to add to a filter that
    is installed already), and otherwise fail as calls that the kernel does not have.
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
        opcode = 0x15 if rule.test == "not" else 0x45
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
    """Runs of successive numbers, as the first and last of each."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def install(rules: Iterable[Rule], *, others: Literal["listed", "all"] = "listed") -> None:
    """Filter this thread and all that it starts, for good. Of several filters each call meets the strictest answer."""
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
