"""`rl train --supervise` in a separate process, for tests that kill parts of it."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
from plasmid_runtime.observe.journal import read_journal

UNREPEATABLE = re.compile(r"(perf|memory|gpu|engine)/.*|sync/.*_s")
TIMEOUT_S = 240


class Supervised:
    """The command, all processes that it ever had, and its output at the end."""

    def __init__(self, run: Path, *arguments: str) -> None:
        self.run, self.seen = run, set[psutil.Process]()
        self.on_disk = on_disk()
        self.output = run.with_name("output.txt")
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plasmid_cli", "train", *arguments, f"run.dir={run}", "--supervise"],
                stdout=output,
                stderr=output,
            )
        self.root = psutil.Process(self.process.pid)

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:  # a test has failed
            for one in [self.root, *self.descendants()]:
                with suppress(psutil.Error):
                    one.kill()
            self.process.wait()

    def driver(self) -> psutil.Process:
        (found,) = (one for one in self.root.children() if "--supervisor" in " ".join(one.cmdline()))
        return found

    def part(self, name: str) -> psutil.Process:
        """Return a process by name: one of the run by its log, one of Ray by its program."""
        for one in self.descendants():
            with suppress(OSError, psutil.Error):
                log = os.readlink(f"/proc/{one.pid}/fd/1")
                if name in (one.name(), Path(log).name.removesuffix(".log")):
                    return one
        raise AssertionError(f"{name} is not running")

    def descendants(self) -> list[psutil.Process]:
        found = self.root.children(recursive=True)
        self.seen |= set(found)
        return found

    def wait_for_checkpoint(self, batch: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (self.run / f"checkpoints/batch-{batch:06d}").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            self.descendants()
            time.sleep(0.02)

    def wait(self) -> int:
        """Return the exit code, after checking that no process or file of the run is left."""
        code = self.process.wait(timeout=TIMEOUT_S)
        assert not [one for one in self.seen if one.is_running()], [
            one.cmdline() for one in self.seen if one.is_running()
        ]
        left = {path for path in on_disk() - self.on_disk if any(f"_{one.pid}" in path for one in self.seen)}
        assert not left
        return code

    def restarts(self) -> list[str]:
        """Return the line of each restart on the terminal; the driver's log has the same."""
        lines = [line for line in self.output.read_text().splitlines() if "; restart " in line]
        logged = (self.run / "logs/driver.log").read_text().splitlines()
        assert [line.partition(" warning: ")[2] for line in logged if "; restart " in line] == [
            line.removeprefix("warning: ") for line in lines
        ]
        return lines

    def restarts_of_run(self) -> int:
        return json.loads((self.run / "run.json").read_text()).get("restarts", 0)


def on_disk() -> set[str]:
    """Return shared memory, and folders of Ray's sessions."""
    sessions = Path(f"/tmp/plasmid-{os.getuid()}/ray")
    return {str(path) for folder in (sessions, Path("/dev/shm")) for path in folder.glob("*")}


def repeatable_metrics(run: Path) -> list[dict[str, float]]:
    """Return the metrics of all batches, without those of time and memory."""
    entries = read_journal(run / "metrics.jsonl")
    return [{"step": e.step, **{k: v for k, v in e.metrics.items() if not UNREPEATABLE.fullmatch(k)}} for e in entries]
