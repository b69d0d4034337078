"""Inject bugs one at a time, and check that a quick test fails for each (mutation testing).

    python scripts/mutate.py                          all bugs of scripts/mutations.toml
    python scripts/mutate.py --only training kl.py    bugs whose file or test contains one of these texts
    python scripts/mutate.py --out results.json       also write the results as JSON, after every bug
    python scripts/mutate.py --new --out results.json only bugs not yet caught in these results
    python scripts/mutate.py --check                  only check that every snippet and test exists

Works in a copy of the tree, in which all tests must pass first. A bug is caught if its test fails; a bug that prevents
pytest from collecting the test is an error in the table. Exit code: 0 if all bugs are caught, 1 if one is not, 2 if the
table is wrong: a snippet does not occur exactly once, or a test does not exist or fails without a bug.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_name("mutations.toml")
LINKED = ("models", ".cache", "shared")
"""Ignored folders that tests read."""
LIMIT_S = 180.0
"""Time limit for one test, in seconds, because a bug may make it hang."""
PRELOADED = ("hypothesis", "numpy", "pydantic", "pytest", "torch")
"""Libraries imported once, before the process forks for each run; none is part of Plasmid."""
PASSED, FAILED = 0, 1
"""Exit codes of pytest; all others mean that the test did not run."""


class TableError(Exception):
    """The table of bugs does not match the tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A change of one file, and the test that must fail with it."""

    file: str
    snippet: str
    replacement: str
    test: str

    def problems(self, root: Path) -> Iterator[str]:
        """Yield the parts of this bug that the tree does not have."""
        path, (test_file, _, name) = root / self.file, self.test.partition("::")
        found = path.read_text().count(self.snippet) if path.is_file() else 0
        if found != 1:
            yield f"{self.file}: the snippet must occur once, it occurs {found} times: {self.snippet!r}"
        if not (root / test_file).is_file() or f"def {name}(" not in (root / test_file).read_text():
            yield f"{self.test}: no such test"


def read_table(path: Path = TABLE) -> list[Bug]:
    """Return the bugs. Raises `TableError` if one changes nothing or occurs twice."""
    bugs = [Bug(**entry) for entry in tomllib.loads(path.read_text())["bug"]]
    for index, bug in enumerate(bugs):
        if bug.snippet == bug.replacement or bug in bugs[:index]:
            raise TableError(f"{bug.file}: changes nothing, or occurs twice: {bug.snippet!r}")
    return bugs


def check(bugs: Sequence[Bug], root: Path = ROOT) -> None:
    """Raise `TableError` with all snippets and tests that the tree does not have."""
    problems = [problem for bug in bugs for problem in bug.problems(root)]
    if problems:
        raise TableError("\n".join(problems))


def copy_tree(target: Path) -> None:
    """Copy the tracked files, and link the folders of models and caches."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, names)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name)
    for name in LINKED:
        if (ROOT / name).exists():
            (target / name).symlink_to((ROOT / name).resolve())
    # compile with content hashes, to detect changes of the same size within one second
    compile_all = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "packages", "tests"]
    subprocess.run([sys.executable, *compile_all], cwd=target, check=True)


def run_tests(tree: Path, tests: Sequence[str], *, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Run tests with the packages of the tree; return pytest's exit code and output.

    Runs in a fork of this process, which has imported torch: importing it takes longer than most tests.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryFile("w+b") as output:
        child = os.fork()
        if child == 0:
            _run_pytest(tree, tests, output.fileno())
        descriptor = os.pidfd_open(child)
        late = not select.select([descriptor], [], [], limit_s)[0]
        os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # including processes that the tests left running
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
    return (FAILED, f"{text}\ndid not finish within {limit_s:g} s") if late else (code, text)


def _run_pytest(tree: Path, tests: Sequence[str], output: int) -> None:
    """Run pytest in a child process; never returns."""
    code = -1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        sources = list(map(str, sorted(tree.glob("packages/*/src"))))
        os.environ["PYTHONPATH"] = os.pathsep.join(sources)
        # otherwise bytecode of the bug would be reused for the restored file if size and second of both are equal
        os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
        sys.path[:0] = [str(tree), *sources]
        import pytest

        code = int(pytest.main(["-n", "0", "-q", "-x", "-p", "no:cacheprovider", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def try_bug(bug: Bug, tree: Path) -> dict[str, object]:
    """Inject one bug, run its test, and undo the bug. Raises `TableError` if the test could not run."""
    path = tree / bug.file
    original = path.read_text()
    started = time.monotonic()
    path.write_text(original.replace(bug.snippet, bug.replacement))
    try:
        code, output = run_tests(tree, [bug.test])
    finally:
        path.write_text(original)
    if code not in (PASSED, FAILED):
        raise TableError(f"{bug.file}: {bug.snippet!r}: the test did not run (exit code {code}):\n{output[-2000:]}")
    return {**asdict(bug), "caught": code == FAILED, "seconds": round(time.monotonic() - started, 1)}


def try_all(bugs: Sequence[Bug]) -> Iterator[dict[str, object]]:
    """Yield the result of each bug. Raises `TableError` if a test fails without a bug."""
    with tempfile.TemporaryDirectory(prefix="plasmid-mutate-") as name:
        tree = Path(name)
        copy_tree(tree)
        tests = sorted({bug.test for bug in bugs})
        code, output = run_tests(tree, tests, limit_s=LIMIT_S * len(tests))
        if code != PASSED:
            raise TableError(f"a test fails without a bug:\n{output[-2000:]}")
        print(f"{len(tests)} tests pass without a bug", flush=True)
        for bug in bugs:
            found = try_bug(bug, tree)
            state = "caught" if found["caught"] else "NOT CAUGHT"
            print(f"{state} in {found['seconds']} s: {bug.file}: {bug.snippet.strip()[:60]!r}", flush=True)
            yield found


def read_outcome(path: Path, bugs: Sequence[Bug]) -> list[dict[str, object]]:
    """Return the results of bugs that were caught earlier."""
    known = json.loads(path.read_text())["table"] if path.exists() else []
    entries = [asdict(bug) for bug in bugs]
    return [found for found in known if found["caught"] and {name: found[name] for name in entries[0]} in entries]


def write_outcome(path: Path, found: Sequence[dict[str, object]], bugs: Sequence[Bug]) -> None:
    """Write the results in the order of the table."""
    files = [(bug.file, bug.snippet) for bug in bugs]
    table = sorted(found, key=lambda one: files.index((str(one["file"]), str(one["snippet"]))))
    caught = sum(bool(one["caught"]) for one in found)
    path.write_text(json.dumps({"bugs": len(found), "caught": caught, "table": table}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    try:
        bugs = [bug for bug in read_table() if any(text in f"{bug.file} {bug.test}" for text in arguments.only)]
        check(bugs)
        found = read_outcome(arguments.out, bugs) if arguments.new else []
        known = [(one["file"], one["snippet"]) for one in found]
        left = [] if arguments.check else [bug for bug in bugs if (bug.file, bug.snippet) not in known]
        for one in try_all(left) if left else ():
            found.append(one)
            if arguments.out:
                write_outcome(arguments.out, found, bugs)
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    missed = [bug for bug in found if not bug["caught"]]
    print(f"{len(bugs)} bugs" + ("" if arguments.check else f", {len(found) - len(missed)} caught"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
