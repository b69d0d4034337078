"""Runs the blocks of a documentation page in a folder, from top to bottom.

The info string after the three backquotes determines what happens to a block:

- a language and a file name: the file is written;
- ``bash``: every line is run and must succeed;
- ``console``: a transcript. Lines after ``$`` are run; the following lines are compared with the output, ignoring
  numbers and spacing; ``...`` stands for any lines. A transcript that shows an ``error:`` must exit with code 2, one of
  ``rl compare`` that shows a difference with code 1;
- ``python`` without a name: the code is run;
- ``toml`` without a name: part of a recipe, not run;
- ``text``: not run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plasmid.errors import PlasmidError
from plasmid.types.runs import Mode
from plasmid_cli.commands.arguments import load
from plasmid_cli.display.progress import make_log_progress, make_progress
from plasmid_cli.main import app
from plasmid_cli.output import (
    begin_transcript,
    end_transcript,
    print_error,
    table_console,
    transcript,
    transcript_console,
)
from plasmid_cli.reports.summary import print_summary
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"bash", "console", "python", "text"}
"""Languages whose blocks need no file name."""
SMALL = (
    "run.prompts_per_batch=2",
    "run.samples_per_prompt=4",
    "trainer.dtype=float32",
    "rollout.dtype=float32",
)
"""Settings inserted after the recipes and before the settings of the page."""
MAKE = {"make train": "rl train recipes/smollm2-sums-cpu.toml"}
"""Commands that Makefile targets run once everything is installed."""


@dataclass(frozen=True)
class Block:
    language: str
    name: str
    text: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Yield each command with the output lines that the page shows."""
        if self.language == "bash":
            return [(line, []) for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        found: list[tuple[str, list[str]]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
        return found


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


@dataclass
class Reader:
    """Executes the blocks of pages in a folder."""

    folder: Path
    in_one_process: bool
    """Run `rl` in this process and without Ray, and skip Python code that trains.

    Applies until pip is called: it installs into a separate folder that this process does not know.
    """
    printed: dict[str, str] = field(default_factory=dict)

    def read(self, page: Path, *, until: str = "") -> None:
        """Execute everything up to the heading ``until``."""
        text = page.read_text().partition(f"\n{until}\n")[0] if until else page.read_text()
        for block in [Block(*found) for found in BLOCK.findall(text)]:
            if block.name and block.language != "text":
                path = self.folder / block.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text)
            elif block.language == "python":
                self._python(block.text)
            elif block.language in ("bash", "console"):
                for line, shown in block.commands():
                    self._command(line, shown)
                    self.in_one_process &= not line.startswith("pip ")

    def _python(self, code: str) -> None:
        if not self.in_one_process:
            self._subprocess([sys.executable, "-c", code])
        elif "plasmid.train(" not in code and "plasmid.open(" not in code:
            with contextlib.chdir(self.folder):
                exec(compile(code, "page", "exec"), {"__name__": "__main__"})

    def _command(self, line: str, shown: Sequence[str]) -> None:
        if line == "make test":
            assert "passed" in shown[-1]
            return
        command = shlex.split(MAKE.get(line, line).partition(" #")[0])
        if command[:2] == ["rl", "train"] and "--dry-run" not in command:
            command = with_small(command)
        here = self.in_one_process and command[0] == "rl"
        code, out = self._here(command) if here else self._subprocess(command)
        endings = {"error: ": 2, "first difference in ": 1}
        expected = max((code for start, code in endings.items() if any(s.startswith(start) for s in shown)), default=0)
        assert code == expected, f"{line}\n{out}"
        assert matches(shown, out), f"{line}\n{out}\n--- is not like ---\n" + "\n".join(shown)
        self.printed[line] = out

    def _subprocess(self, command: Sequence[str]) -> tuple[int, str]:
        here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        site = str(self.folder / "site-packages")
        pip = {"PIP_TARGET": site, "PIP_NO_INDEX": "1"}
        python = os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **pip, "PATH": here, "PYTHONPATH": python, "COLUMNS": "200"}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        assert command[0] == "rl" or done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.returncode, done.stdout + done.stderr

    def _here(self, command: Sequence[str]) -> tuple[int, str]:
        out = io.StringIO()
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code = rl(command[1:])
            except SystemExit as end:
                code = int(end.code or 0)
            except PlasmidError as error:
                print_error(str(error))
                code = 2
        return code, out.getvalue()


def with_small(command: Sequence[str]) -> list[str]:
    """Return the command with `SMALL` after its recipes."""
    last = max(i for i, part in enumerate(command) if part.endswith(".toml"))
    return [*command[: last + 1], *SMALL, *command[last + 1 :]]


def rl(arguments: Sequence[str]) -> int:
    """Run the command `rl` in this process, with a local cluster for runs."""
    if arguments[0] != "train" or "--dry-run" in arguments:
        app(arguments, make_cluster=lambda _: LocalCluster())
    parser = argparse.ArgumentParser()
    parser.add_argument("items", nargs="*")
    parser.add_argument("--rollouts-only", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--resume-auto", dest="resume", action="store_const", const="auto")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--plugin", action="append", type=Path)
    given = parser.parse_intermixed_args(["--resume-auto" if a == "--resume=auto" else a for a in arguments[1:]])
    config = load(given.items, given.plugin)
    mode = Mode(resume=given.resume, replay=given.replay, rollouts_only=given.rollouts_only)
    begin_transcript()
    try:
        console = table_console()
        with make_progress(config, console) as progress:
            observers = [transcript(), progress, *make_log_progress(config, console, transcript_console())]
            result = run(config, mode=mode, observers=observers, make_cluster=lambda _: LocalCluster())
        print_summary(result, console)
    finally:
        end_transcript()
    return 0


def matches(shown: Sequence[str], out: str) -> bool:
    """Return True if the output contains the lines that a page shows, in order, with gaps only at ``...``."""
    wanted = [shape(line) for line in shown if line.strip()]
    pattern = "".join(_gap() if line == "..." else re.escape(line) + "\n" for line in wanted)
    return re.search(f"^{pattern}", "".join(f"{line}\n" for line in shapes(out)), re.MULTILINE) is not None


def _gap() -> str:
    return r"(?:.*\n)*?"


def shapes(text: str) -> Iterator[str]:
    return (shape(line) for line in text.splitlines() if line.strip())


def shape(line: str) -> str:
    """Return a line without its numbers and spacing."""
    return " ".join(re.sub(r"[-+]?\d[\d.,:]*", "#", line).split())
