"""A filter of system calls (seccomp), assembled by hand: it is short, and needs no library that a host may lack."""

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

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000
AF_UNIX = 1
X32_BIT = 0x40000000

NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fork": (57, None),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "kill": (62, 129),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setns": (308, 268),
    "socket": (41, 198),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vfork": (58, None),
}
"""System call -> its number on x86_64 and on aarch64."""
PRIVILEGED = (
    *("acct", "add_key", "bpf", "chroot", "delete_module", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick"),
    *("init_module", "io_uring_enter", "io_uring_register", "io_uring_setup", "kcmp", "kexec_load", "keyctl", "mount"),
    *("mount_setattr", "move_mount", "move_pages", "name_to_handle_at", "open_by_handle_at", "open_tree"),
    *("perf_event_open", "personality", "pidfd_getfd", "pivot_root", "process_madvise", "process_vm_readv"),
    *("process_vm_writev", "ptrace", "reboot", "request_key", "setns", "swapoff", "swapon", "umount2", "unshare"),
    "userfaultfd",
)
"""What no program under test needs: other processes' memory, mounts, namespaces, keys, and wide kernel interfaces."""
SIGNALS = ("kill", "tkill", "pidfd_open", "pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo")


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
        *map(Rule, PRIVILEGED),
        # clone3 takes its flags in memory, where no filter can look; the C library then falls back on clone
        Rule("clone3", REFUSE | errno.ENOSYS),
        Rule("clone", test="any-bit", value=CLONE_NAMESPACES),
        # a network namespace does not bound every family: AF_VSOCK reaches the host of a virtual machine
        Rule("socket", REFUSE | errno.EACCES, test="not", value=AF_UNIX),
        Rule("prlimit64", test="not", value=0),
    ]


def compute_rules(pid: int, *, network: bool = False, processes: bool = False) -> list[Rule]:
    """For one process that only computes: no network, no processes but itself, no signals to others."""
    rules = [*map(Rule, PRIVILEGED), Rule("prlimit64", test="not", value=0)]
    if not network:
        rules.append(Rule("socket", REFUSE | errno.EACCES))
    if not processes:
        rules += [Rule("clone3", REFUSE | errno.ENOSYS), Rule("clone", KILL, test="no-bit", value=CLONE_THREAD)]
        rules += [Rule(call, KILL) for call in ("fork", "vfork")]
        rules += [*map(Rule, SIGNALS), Rule("tgkill", test="not", value=pid)]
    return rules


def supported() -> bool:
    """True if this machine's system calls are known here."""
    return sys.platform == "linux" and platform.machine() in ARCHITECTURES and sys.byteorder == "little"


def program(rules: Iterable[Rule], machine: str) -> bytes:
    """The rules as instructions of the classic Berkeley packet filter."""
    column = list(ARCHITECTURES).index(machine)
    load_nr, other_architecture = _load(0), [_load(4), _jump(0x15, ARCHITECTURES[machine], 1, 0), _return(KILL)]
    code = [*other_architecture, load_nr]
    if machine == "x86_64":
        code += [_jump(0x35, X32_BIT, 0, 1), _return(KILL)]
    for rule in rules:
        number = NUMBERS[rule.call][column]
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
    return b"".join([*code, _return(ALLOW)])


def install(rules: Iterable[Rule]) -> None:
    """Filter this thread and all that it starts, for good."""
    code = program(rules, platform.machine())
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
