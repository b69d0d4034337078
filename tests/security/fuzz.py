"""Give mutated inputs to every parser and endpoint: each must be accepted, or refused in one line.

    python tests/security/fuzz.py --inputs 100000 --seed 1 --out fuzz.json

Inputs are checked in forked processes, so that one that crashes, hangs or takes all memory is known. Failures are any
exception but the project's errors, more than one line, a traceback or control characters in the output, too much time
or memory, a file written elsewhere, a process started, and code of an input that runs. A failing input is saved, and
the command that repeats it printed. Exits with 1 if there is one. Input number N depends on the seed, the target and N.
"""

import argparse
import contextlib
import io
import json
import mmap
import os
import platform
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from importlib import import_module
from pathlib import Path
from random import Random

TOP = Path(__file__).parents[2]
if str(TOP) not in sys.path:
    sys.path.insert(0, str(TOP))
for _name, _value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(_name, _value)

from tests.security.fuzz_folders import FOLDER_TARGETS  # noqa: E402
from tests.security.fuzz_targets import PARSER_TARGETS, Finding, Target  # noqa: E402

TARGETS = {**PARSER_TARGETS, **FOLDER_TARGETS}

COMMON = ("plasmid.errors", "plasmid_runtime.plugin", "plasmid_cli.main", "plasmid_cli.output")
"""Modules imported once, before the processes of targets are forked."""
BATCH = 1000
"""Number of inputs per process."""
ADDRESS_SPACE = 2 << 30
"""Memory that a process may use in addition, in bytes; its inputs should use far less."""
WALL_S = 120.0
"""Time limit for one input in seconds, also on a busy machine."""
SETUP_S = 300.0
SHOWN = 3
"""Number of saved inputs per place of failure."""
NO_MEMORY = re.compile(r"MemoryError|[Uu]nable to allocate|can't allocate|not enough memory|bad_alloc|[Oo]ut of memory")
ACTING = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that control a terminal or hide text."""
STARTS = {"os.system", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "pty.spawn"}
CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}
INDEX, CPU, WALL, ACCEPTED, REFUSED, PEAK, SECONDS = range(7)


def input_of(target: Target, examples: list[bytes], name: str, seed: int, index: int) -> bytes:
    """Return the examples themselves first, then mutations."""
    if index < len(examples):
        return examples[index]
    random = Random(f"{seed} {name} {index}")
    return target.mutate(random, random.choice(examples), examples)


class Watch:
    """Records side effects of checks: files, processes and connections (an audit hook, which sees all of Python)."""

    def __init__(self, root: Path, target: Target) -> None:
        self.found: list[str] = []
        self._root, self._starts, self.active = str(root.resolve()), target.starts_processes, False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if not self.active:
            return
        if event == "open":
            path, mode, flags = args
            is_writing = bool(set(mode or "") & set("wax+")) or bool(
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            )
            if is_writing and not isinstance(path, int) and self._is_outside(path):
                self.found.append(f"writes {path!r}")
        elif event in CHANGES:
            self.found += [f"{event} {path!r}" for path in args[:2] if isinstance(path, str | bytes | os.PathLike)
                           and self._is_outside(path)]  # fmt: skip
        elif event in STARTS and not self._starts:
            self.found.append(f"{event} {args!r:.200}")
        elif event == "exec" and getattr(args[0], "co_filename", "").startswith(self._root):
            self.found.append(f"runs code of {args[0].co_filename}")
        elif event == "socket.connect" and args[1][0] not in ("127.0.0.1", "::1"):
            self.found.append(f"connects to {args[1]!r}")

    def _is_outside(self, path: str | bytes | os.PathLike) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        return real != "/dev/null" and not (real == self._root or real.startswith(f"{self._root}/"))


class Checker:
    """Checks inputs in this process, which is a forked one."""

    def __init__(self, target: Target, root: Path) -> None:
        self._console = os.open(root / "console", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(self._console, 1)
        os.dup2(self._console, 2)
        self.target, self.root = target, root
        self.watch = Watch(root, target)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def check(self, check, data: bytes) -> tuple[str, str]:
        """Return ``accepted`` or ``refused`` and the output, or the kind of failure and its description."""
        from plasmid.utils.printable import PrintableStream

        before, out = reset_peak(), io.StringIO()
        began = time.process_time()
        self.watch.found.clear()
        self.watch.active = True
        try:
            stream = PrintableStream(out)
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                outcome = self._outcome(check, data)
        finally:
            self.watch.active = False
        seconds, grown = time.process_time() - began, peak_mb() - before
        printed = out.getvalue() + self._written()
        if outcome[0] not in ("accepted", "refused"):
            return outcome
        if self.watch.found:
            return "reaches out", self.watch.found[0]
        if seconds > self.target.cpu_s:
            return "slow", f"takes {seconds:.1f} s of processor time"
        if grown > self.target.memory_mb or (NO_MEMORY.search(printed) and not self.target.reserves_memory):
            return "memory", f"takes {grown:.0f} MiB; {printed[:300]}"
        return faults(outcome[0], outcome[1], printed) or (outcome[0], printed)

    def _outcome(self, check, data: bytes) -> tuple[str, str]:
        from plasmid.errors import ConfigError
        from plasmid_cli.main import _report

        try:
            check(data)
        except SystemExit as end:
            return ("refused", "many") if end.code == 2 else ("accepted", "")  # the command has reported it
        except Finding as error:
            return "finding", f"{error}\n{traceback.format_exc()}"
        except Exception as error:  # noqa: BLE001  boundary: that is what is looked for
            try:
                _report(error, debug=False)
            except Exception:  # noqa: BLE001  no error that is made for users
                return type(error).__name__, traceback.format_exc()
            return "refused", "many" if isinstance(error, ConfigError) else "one"
        return "accepted", ""

    def _written(self) -> str:
        """Return what libraries have written past Python's streams."""
        size = os.fstat(self._console).st_size
        if not size:
            return ""
        data = os.pread(self._console, 10_000, 0)
        os.ftruncate(self._console, 0)
        return data.decode(errors="replace")


def faults(outcome: str, lines: str, printed: str) -> tuple[str, str] | None:
    """Return what is wrong with the output for an input; None if nothing is."""
    if "Traceback (most recent" in printed:
        return "traceback", printed[-3000:]
    if any(unicodedata.category(character) in ACTING for character in printed if character not in "\n\t"):
        return "control characters", repr(printed[:500])
    errors = [line for line in printed.split("\n") if line.startswith("error:") and line[6:].strip()]
    if outcome == "refused" and (not errors or (lines == "one" and len(errors) > 1)):
        return "no clear line", repr(printed[:500])
    return None


def reset_peak() -> float:
    """Reset the peak memory of this process; return its current memory, in MiB."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return peak_mb()


def peak_mb() -> float:
    found = re.search(rb"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_bytes())
    return int(found[1]) / 1024 if found else 0.0


def work(target: Target, root: Path, inputs, shared: memoryview, findings: Path) -> None:
    """Check inputs of (index, data, whether it is a valid example) one after another; the body of a forked process."""
    sys.dont_write_bytecode = True
    checker = Checker(target, root)
    with target.opened() as check:
        for index, data, is_example in inputs:
            shared[CPU], shared[WALL], shared[INDEX] = time.process_time(), time.monotonic(), index
            kind, text = checker.check(check, data)
            if kind == "refused" and is_example:
                kind = "valid example refused"
            shared[SECONDS] = max(shared[SECONDS], time.process_time() - shared[CPU])
            shared[PEAK] = max(shared[PEAK], peak_mb())
            if kind in ("accepted", "refused"):
                shared[ACCEPTED if kind == "accepted" else REFUSED] += 1
            if kind not in ("accepted", "refused"):
                with findings.open("a") as file:
                    file.write(json.dumps({"index": index, "kind": kind, "text": text[-3000:]}) + "\n")
        shared[INDEX] = -1


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Host:
    """Forks and monitors the processes that check the inputs of one target."""

    def __init__(self, name: str, target: Target, seed: int, failures: Path) -> None:
        self.name, self.target, self.seed, self.failures = name, target, seed, failures
        self.root = Path(tempfile.mkdtemp(prefix="fuzz-"))
        self.findings: list[dict] = []
        self._shared = memoryview(mmap.mmap(-1, 8 * 8)).cast("d")
        self._file = self.root / "findings.jsonl"
        box = self.root / "box"
        box.mkdir()
        os.chdir(box)
        os.environ |= {"HOME": str(self.root), "TMPDIR": str(self.root)}
        for module in (*COMMON, *target.modules):
            import_module(module)
        self.examples = target.examples()

    def run(self, count: int, until: float, report) -> dict:
        """Check inputs 0 to ``count``, or fewer if the time is over; always checks the examples."""
        began, at, cpu = time.monotonic(), 0, resource.getrusage(resource.RUSAGE_CHILDREN)
        while at < count and (at < len(self.examples) or time.monotonic() < until):
            end = min(count, at + BATCH)
            at = self._fork(map(self._numbered, range(at, end)), at, end, until, report)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = {"inputs": at, "accepted": int(self._shared[ACCEPTED]), "refused": int(self._shared[REFUSED])}
        return done | {
            "failures": len(self.findings),
            "seconds": round(time.monotonic() - began, 1),
            "cpu_seconds": round(used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime, 1),
            "slowest_cpu_s": round(self._shared[SECONDS], 2),
            "peak_mib": round(self._shared[PEAK]),
            "findings": self._saved(),
        }

    def _numbered(self, index: int) -> tuple[int, bytes, bool]:
        data = input_of(self.target, self.examples, self.name, self.seed, index)
        return index, data, index < len(self.examples)

    def replay(self, data: bytes) -> list[dict]:
        """Return the findings for one input."""
        self._fork(iter([(0, data, False)]), 0, 1, float("inf"), lambda at: None)
        return self.findings

    def _fork(self, inputs, at: int, end: int, until: float, report) -> int:
        """Check inputs in one process; return the number of the first that was not checked."""
        self._shared[INDEX] = -2
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                work(self.target, self.root, inputs, self._shared, self._file)
                os._exit(0)
            except BaseException:  # noqa: BLE001  boundary: a forked process must not return
                traceback.print_exc()
                os._exit(3)
        forked, why = time.monotonic(), ""
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            index, now = int(self._shared[INDEX]), time.monotonic()
            report(max(at, index))
            if index < 0:
                why = "the target does not get ready" if now - forked > SETUP_S else ""
            elif cpu_of(pid) - self._shared[CPU] > 2 * self.target.cpu_s or now - self._shared[WALL] > WALL_S:
                why = "does not end"
            if why or (now > until and index >= len(self.examples)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                ended = os.waitpid(pid, 0)
                break
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that it may have left
        self._read_findings()
        index = int(self._shared[INDEX])
        code = os.waitstatus_to_exitcode(ended[1])
        if code == -signal.SIGKILL and not why and time.monotonic() > until:  # the time is over
            return max(at, index)
        if index == -2:
            console = (self.root / "console").read_text(errors="replace") if (self.root / "console").exists() else ""
            raise RuntimeError(f"{self.name}: cannot be set up (exit code {code}): {why}\n{console[-3000:]}")
        if code and index >= 0:
            self.findings.append(
                {"index": index, "kind": "hang" if why else "crash", "text": why or f"exit code {code}"}
            )
            return index + 1
        return end

    def _read_findings(self) -> None:
        if self._file.exists():
            self.findings += map(json.loads, self._file.read_text().splitlines())
            self._file.unlink()

    def _saved(self) -> list[dict]:
        """Return one entry for each place of failures, with the inputs that are saved for it."""
        places: dict[str, dict] = {}
        for finding in self.findings:
            lines = [line for line in finding["text"].split("\n") if f'File "{TOP}' in line]
            place = f"{finding['kind']} {lines[-1].strip() if lines else ''}"
            entry = places.setdefault(
                place, {"kind": finding["kind"], "text": finding["text"], "count": 0, "saved": []}
            )
            entry["count"] += 1
            if len(entry["saved"]) < SHOWN:
                self.failures.mkdir(parents=True, exist_ok=True)
                file = self.failures / f"{self.name}-{finding['index']}.bin"
                file.write_bytes(input_of(self.target, self.examples, self.name, self.seed, finding["index"]))
                entry["saved"].append(str(file))
        return list(places.values())

    def close(self) -> None:
        os.chdir("/")
        shutil.rmtree(self.root, ignore_errors=True)


def fuzz_target(name: str, target: Target, count: int, seed: int, failures: Path, seconds: float) -> dict:
    """Fuzz one target in a separate process, which imports what it needs."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            host = Host(name, target, seed, failures)
            try:
                found = host.run(count, time.monotonic() + seconds, progress(name, count, host))
            finally:
                host.close()
            with os.fdopen(theirs, "w") as file:
                json.dump(found, file)
            code = 0
        except BaseException:  # noqa: BLE001  boundary: a forked process must not return
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(theirs)
    with os.fdopen(ours) as file:
        result = file.read()
    os.waitpid(pid, 0)
    if not result:
        finding = {"kind": "cannot be fuzzed", "text": "", "count": 1, "saved": []}
        return {**dict.fromkeys((*COLUMNS, "cpu_seconds"), 0), "failures": 1, "findings": [finding]}
    return json.loads(result)


def progress(name: str, count: int, host: Host):
    """Show the progress of a target on a terminal."""
    last = 0.0

    def report(at: int) -> None:
        nonlocal last
        if sys.stderr.isatty() and time.monotonic() - last > 0.3:
            last = time.monotonic()
            sys.stderr.write(f"\r{name:20} {at:>7,} of {count:,}, {len(host.findings)} failures \x1b[K")
            sys.stderr.flush()

    return report


COLUMNS = ("inputs", "accepted", "refused", "failures", "seconds", "slowest_cpu_s", "peak_mib")


def row(name: str, found: dict) -> str:
    return f"| {name:18} | " + " | ".join(f"{found[column]:>8,}" for column in COLUMNS) + " |"


def replay(name: str, file: Path) -> int:
    """Check one saved input, and print what is wrong with it."""
    data = file.read_bytes()
    host = Host(name, TARGETS[name], 0, Path())
    try:
        findings = host.replay(data)
    finally:
        host.close()
    for finding in findings:
        print(f"{finding['kind']}: {finding['text']}")
    print("fails" if any(f["kind"] not in ("accepted", "refused") for f in findings) else "passes")
    return int(bool(findings))


def main(argv: list[str] | None = None, targets: dict[str, Target] = TARGETS) -> int:
    """Fuzz; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="over all targets")
    parser.add_argument("--seed", type=int, help="drawn unless given")
    parser.add_argument("--target", action="append", choices=sorted(targets), help="these targets only")
    parser.add_argument("--seconds", type=float, default=1e9, help="longest time; each target gets its part of it")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="folder for inputs that fail")
    parser.add_argument("--replay", type=Path, help="check this saved input of a target, and nothing else")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args(argv)
    if given.replay:
        return replay(given.target[0], given.replay.absolute())
    if given.out:
        given.out.open("a").close()  # a path that cannot be written fails now, not after the run
    seed = int.from_bytes(os.urandom(4)) if given.seed is None else given.seed
    chosen = {name: target for name, target in targets.items() if not given.target or name in given.target}
    shares = sum(target.share for target in chosen.values())
    for module in COMMON:
        import_module(module)
    found, began = {}, time.monotonic()
    print(f"seed {seed}\n| {'target':18} | " + " | ".join(f"{column:>8}" for column in COLUMNS) + " |")
    print("|" + "---|" * (len(COLUMNS) + 1), flush=True)
    for index, (name, target) in enumerate(chosen.items()):
        left = (given.seconds - (time.monotonic() - began)) / (len(chosen) - index)
        count = max(20, round(given.inputs * target.share / shares))
        found[name] = fuzz_target(name, target, count, seed, given.failures.absolute(), left)
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
        print(row(name, found[name]), flush=True)
    total = {column: sum(one[column] for one in found.values()) for column in COLUMNS}
    total |= {column: max(one[column] for one in found.values()) for column in ("slowest_cpu_s", "peak_mib")}
    total["seconds"] = round(time.monotonic() - began, 1)
    print(row("all", total))
    for name, one in found.items():
        for finding in one["findings"]:
            print(f"\n{name}: {finding['count']} x {finding['kind']}: {finding['text']}")
            for file in finding["saved"]:
                print(f"    python tests/security/fuzz.py --target {name} --replay {file}")
    if given.out:
        command = f"python tests/security/fuzz.py --inputs {given.inputs} --seed {seed}"
        facts = {"command": command, "python": platform.python_version(), "cores": os.cpu_count(), "total": total}
        given.out.write_text(json.dumps(facts | {"targets": found}, indent=1) + "\n")
    return int(total["failures"] > 0)


if __name__ == "__main__":
    sys.exit(main())
