"""Runs one program in a sandbox. Started as a separate program, because namespaces require a single-threaded process.

This process moves into new namespaces. Its child is their first process: it builds the root, and starts the program as
its own child. When the first process of a PID namespace ends, the kernel kills all others.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from . import landlock, root, seccomp
from .linux import PR_SET_DUMPABLE, die_with_parent, drop_capabilities, empty_bounding_set, prctl, set_limits, unshare

NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, mount, PID, network, IPC and UTS namespaces."""
INSIDE = 1000
"""User id within the sandbox: not 0, so that executing a program grants no capabilities."""
NOBODY = 65534
Spec = Mapping[str, Any]


def main() -> None:
    """Read what to run from standard input, run it, and write the outcome to the status pipe."""
    os.umask(0o022)
    spec: Spec = json.load(sys.stdin.buffer)
    status = spec["status_fd"]
    os.set_inheritable(status, False)
    try:
        die_with_parent()
        group = _open_group(spec["memory_group"])
        if spec["namespaces"]:
            _run_isolated(spec, status, group)
        else:
            _report(status, _run_confined(spec, group))
    except OSError as error:
        _report(status, {"refused": f"{error.strerror or error}"})


def _report(status: int, report: Mapping[str, Any]) -> None:
    os.write(status, json.dumps(report).encode())


def _open_group(path: str | None) -> int | None:
    """Open the file to which a process writes 0 to join a control group. Later the host's files are out of reach."""
    return None if path is None else os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)


def _run_isolated(spec: Spec, status: int, group: int | None) -> None:
    as_nobody = _new_namespaces()
    first = os.fork()
    if first == 0:
        _first_process(spec, status, group, as_nobody)
    os.waitpid(first, 0)


def _new_namespaces() -> bool:
    """Enter new namespaces. Returns True if the program can run as nobody, which root can arrange."""
    asking, answer = os.pipe(), os.pipe()
    me, uid, gid = os.getpid(), os.geteuid(), os.getegid()
    helper = os.fork()
    if helper == 0:
        os.close(asking[1])
        os.read(asking[0], 1)  # until the namespaces exist
        os.write(answer[1], b"n" if _write_maps(me, uid, gid) else b"u")
        os._exit(0)
    unshare(NAMESPACES)
    die_with_parent()
    os.close(answer[1])
    os.write(asking[1], b"x")
    told = os.read(answer[0], 1)
    os.waitpid(helper, 0)
    if not told:
        raise OSError("cannot map user ids into a user namespace")
    return told == b"n"


def _write_maps(pid: int, uid: int, gid: int) -> bool:
    folder = f"/proc/{pid}"
    if uid == 0:
        try:
            _write(f"{folder}/uid_map", f"0 0 1\n{INSIDE} {NOBODY} 1\n")
            _write(f"{folder}/gid_map", f"0 {gid} 1\n{INSIDE} {NOBODY} 1\n")
            return True
        except OSError:
            pass  # root without permission to map others, as in some containers
    try:
        _write(f"{folder}/setgroups", "deny")
        _write(f"{folder}/uid_map", f"{INSIDE} {uid} 1\n")
        _write(f"{folder}/gid_map", f"{INSIDE} {gid} 1\n")
    except OSError:
        os._exit(1)
    return False


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _first_process(spec: Spec, status: int, group: int | None, as_nobody: bool) -> None:
    """Run as the first process of the namespaces. Never returns."""
    try:
        die_with_parent()
        root.enter(spec["readable"], disk_bytes=spec["disk_bytes"], num_files=spec["num_files"], uid=INSIDE)
        if as_nobody:
            os.setgroups([])
            os.setresgid(INSIDE, INSIDE, INSIDE)
            os.setresuid(INSIDE, INSIDE, INSIDE)
        die_with_parent()  # changing ids has cleared it
        empty_bounding_set()
        drop_capabilities()
        prctl(PR_SET_DUMPABLE, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # with a handler, programs inside could send it
        os.chdir(root.WORK)
        _report(status, _run(spec, group))
    except OSError as error:
        _report(status, {"refused": f"{error.strerror or error}"})
    finally:
        os._exit(0)


def _run_confined(spec: Spec, group: int | None) -> dict[str, Any]:
    """Run without namespaces: one process, no network, and with Landlock no files but its own."""
    prctl(PR_SET_DUMPABLE, 0)
    os.chdir(spec["work"])
    return _run(spec, group)


def _run(spec: Spec, group: int | None) -> dict[str, Any]:
    """Start the program in the current folder and wait for it."""
    for name, text in spec["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    given = _seal(base64.b64decode(spec["stdin"]))
    child = os.fork()
    if child == 0:
        _program(spec, given, group)
    return _wait(child, spec["wall_s"])


def _seal(data: bytes) -> int:
    """Create a read-only file in memory, whose pages count toward no limit."""
    file = os.memfd_create("stdin", os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _program(spec: Spec, given: int, group: int | None) -> None:
    """Execute the program. Never returns."""
    try:
        os.setsid()
        if group is not None:
            os.write(group, b"0")
        os.dup2(given, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        die_with_parent()
        if spec["namespaces"]:
            rules = seccomp.sandbox_rules()
        else:
            landlock.confine_files([*root.SYSTEM, *spec["readable"]], [spec["work"]], root.DEVICES)
            empty_bounding_set()
            drop_capabilities()
            rules = [*seccomp.worker_rules(network=False), *seccomp.single_process_rules(os.getpid())]
            rules += seccomp.metadata_rules()
        set_limits(spec["limits"])
        if seccomp.is_supported():
            seccomp.install(rules)
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        os.write(2, f"cannot start: {error}".encode())
    finally:
        os._exit(127)


def _wait(child: int, wall_s: float) -> dict[str, Any]:
    """Reap children until the program ends, or kill it when its time is up."""
    started = time.monotonic()
    descriptor = os.pidfd_open(child)
    late = not select.select([descriptor], [], [], wall_s)[0]
    if late:
        os.killpg(child, signal.SIGKILL)
    _, code, usage = os.wait4(child, 0)
    return {
        "late": late,
        "signal": os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0,
        "exit": os.WEXITSTATUS(code) if os.WIFEXITED(code) else 0,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - started,
    }
