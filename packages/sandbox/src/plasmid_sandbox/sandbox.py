"""Sandboxes for untrusted programs. docs/design/sandbox.md lists which mechanism enforces what."""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from plasmid.components import Settings
from plasmid.errors import IsolationError
from plasmid.settings.trust import ACTIVE
from plasmid.utils.safe_files import temporary_folder
from pydantic import Field

from .confinement import landlock
from .confinement.linux import PR_SET_DUMPABLE, prctl
from .memory_group import memory_group

GRACE_S = 5.0
"""Time that a launcher has beyond its deadline to end on its own, in seconds."""
BOOT = """import sys, types
package = types.ModuleType("confinement")
package.__path__ = [sys.argv[1]]
sys.modules["confinement"] = package
from confinement.launcher import main
main()
"""
"""Starts the launcher without the package's other imports, which would take longer than most programs run."""


class SandboxSettings(Settings):
    """Resource limits and isolation of programs."""

    isolation: Annotated[Literal["namespaces", "limits"], ACTIVE] = "namespaces"
    """``namespaces``: only its own network, files and processes; an error if the host does not permit it.
    ``limits``: one process without network and with the limits below. Where the kernel has Landlock (5.13 or newer)
    it can access only its own files; elsewhere it can read and write whatever this user can."""
    wall_s: float = Field(10.0, gt=0)
    """Wall-clock limit of one program, in seconds."""
    cpu_s: int = Field(10, ge=1)
    """CPU time limit of each process, in seconds."""
    memory_mb: int = Field(512, ge=32)
    """Address space limit of each process, in MiB. Where a control group (version 2) can be created, also the limit
    on the total memory of a program's processes, plus its folder (``disk_mb``)."""
    processes: int = Field(16, ge=1)
    """Maximum number of concurrent processes and threads (``namespaces`` only; ``limits`` allows one process)."""
    disk_mb: int = Field(16, ge=1)
    """Size limit of a program's folder, in MiB; counts as memory of the host. With ``limits`` it applies to each
    file."""
    output_kb: int = Field(256, ge=1)
    """Maximum output of a program, in KiB. A program that writes more is stopped."""
    readable: tuple[str, ...] = ()
    """Files and folders of the host that programs may read, in addition to system programs and Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A Python program to run."""

    source: str
    stdin: bytes = b""
    files: Mapping[str, str] = field(default_factory=dict)
    """Other files in its folder, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    stdout: bytes = b""
    stderr: bytes = b""
    error: str | None = None
    """Why it failed; None if it exited with 0."""
    refused: bool = False
    """Whether the host did not permit the sandbox, so that nothing ran."""
    cpu_s: float = 0.0


class Sandbox:
    """Runs programs, each in its own sandbox. Thread-safe."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings

    def check(self) -> None:
        """Run a trivial program. Raises `IsolationError` if this host does not permit it."""
        if sys.platform != "linux":
            raise IsolationError(f"sandbox: requires Linux, this is {sys.platform}")
        outcome = self.run(Program(source="print(2 + 2)"))
        if outcome.refused or outcome.stdout != b"4\n":
            why = outcome.error or outcome.stderr.decode(errors="replace")[-200:]
            raise IsolationError(
                f"sandbox: this host does not permit isolation = {self.settings.isolation!r}: {why}; allow "
                'unprivileged user namespaces, or set isolation = "limits", which is less strict'
            )

    @cached_property
    def _python(self) -> str:
        """Return the real interpreter: a virtual environment's symbolic link would dangle inside."""
        return os.path.realpath(sys.executable)

    def run(self, program: Program) -> Outcome:
        """Run one program to its end. Blocks for at most ``wall_s`` plus the launcher's grace period."""
        if self.settings.isolation == "limits" and not landlock.version():
            prctl(PR_SET_DUMPABLE, 0)  # otherwise the program could read this process's memory and environment
        bound = (self.settings.memory_mb + self.settings.disk_mb) << 20
        with (
            temporary_folder("plasmid-sandbox-") as work,
            memory_group(bound) as group,
        ):
            reading, writing = os.pipe()
            try:
                spec = json.dumps({**self._spec(program, writing, str(work)), "memory_group": group}).encode()
                process = self._launch(writing)
            finally:
                os.close(writing)
            with os.fdopen(reading, "rb", buffering=0) as status:
                return self._follow(process, spec, status)

    def _launch(self, status: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._python, "-I", "-S", "-c", BOOT, str(Path(__file__).parent / "confinement")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(status,),
            env={"PATH": "/usr/bin:/bin"},
            cwd="/",
            start_new_session=True,
        )

    def _spec(self, program: Program, status: int, work: str) -> dict[str, Any]:
        settings, mb = self.settings, 1 << 20
        isolated = settings.isolation == "namespaces"
        limits = {
            "AS": settings.memory_mb * mb,
            "CPU": settings.cpu_s,
            "FSIZE": settings.disk_mb * mb,
            "NOFILE": 64,
            "CORE": 0,
            "MSGQUEUE": 0,
            "SIGPENDING": 256,  # includes timers
            "MEMLOCK": 0,
        }
        if isolated:
            limits["NPROC"] = settings.processes + 1  # the first process of the sandbox counts, too
        home = "/work" if isolated else work
        return {
            "namespaces": isolated,
            "argv": [self._python, "-I", "-S", "-X", "utf8", "main.py"],
            "env": {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"},
            "files": {**program.files, "main.py": program.source},
            "stdin": base64.b64encode(program.stdin).decode(),
            "readable": [os.path.realpath(path) for path in (sys.base_prefix, *settings.readable)],
            "limits": limits,
            "disk_bytes": settings.disk_mb * mb,
            "num_files": 256 + 16 * settings.disk_mb,
            "wall_s": settings.wall_s,
            "status_fd": status,
            "work": work,
        }

    def _follow(self, process: subprocess.Popen[bytes], spec: bytes, status: IO[bytes]) -> Outcome:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with process.stdin, process.stdout, process.stderr:
            streams = _Streams((process.stdout, process.stderr, status), self.settings.output_kb << 10)
            try:
                _send(process.stdin, spec)
                ended = streams.read(self.settings.wall_s + GRACE_S)
            finally:
                _kill(process)
            out, err, report = streams.data()
            if streams.over:
                return Outcome(stdout=out, stderr=err, error=f"output exceeds output_kb = {self.settings.output_kb}")
            if not report:
                error = (
                    "did not finish within wall_s"
                    if not ended
                    else "the sandbox failed: " + err.decode(errors="replace")
                )
                return Outcome(stdout=out, error=error[:300], refused=ended)
            return self._outcome(json.loads(report), out, err)

    def _outcome(self, report: Mapping[str, Any], out: bytes, err: bytes) -> Outcome:
        if "refused" in report:
            return Outcome(error=report["refused"], refused=True)
        error = None
        if report["late"]:
            error = f"did not finish within wall_s = {self.settings.wall_s:g}"
        elif report["signal"]:
            error = f"killed by {_signal(report['signal'])}"
        elif report["exit"]:
            last = err.decode(errors="replace").strip().rpartition("\n")[2][:200]
            error = f"exit code {report['exit']}" + (f": {last}" if last else "")
        return Outcome(stdout=out, stderr=err, error=error, cpu_s=report["cpu_s"])


class _Streams:
    """Reads several pipes concurrently, up to a number of bytes each."""

    def __init__(self, pipes: Sequence[IO[bytes]], limit: int) -> None:
        self._pipes, self._limit = pipes, limit
        self._parts: dict[int, bytearray] = {pipe.fileno(): bytearray() for pipe in pipes}
        self.over = False

    def read(self, timeout_s: float) -> bool:
        """Read until all pipes are closed (True), one exceeds its limit, or the time is up."""
        until = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for number in self._parts:
                selector.register(number, selectors.EVENT_READ)
            while selector.get_map() and not self.over:
                left = until - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    return False
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    part = self._parts[key.fd]
                    part += data
                    self.over |= len(part) > self._limit
                    if not data:
                        selector.unregister(key.fd)
        return True

    def data(self) -> list[bytes]:
        """Return what was read from each pipe."""
        return [bytes(self._parts[pipe.fileno()][: self._limit]) for pipe in self._pipes]


def _send(pipe: IO[bytes], data: bytes) -> None:
    with suppress(BrokenPipeError):  # the launcher ended at once; its status or standard error says why
        pipe.write(data)
        pipe.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _signal(number: int) -> str:
    names = {signal.SIGXCPU: " (cpu_s)", signal.SIGXFSZ: " (disk_mb)", signal.SIGKILL: " (cpu_s, or out of memory)"}
    try:
        return signal.Signals(number).name + names.get(signal.Signals(number), "")
    except ValueError:
        return f"signal {number}"
