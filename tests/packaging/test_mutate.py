"""The table of injected bugs matches the code, and the script distinguishes bugs that are caught from others."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("mutate", ROOT / "scripts/mutate.py")
mutate = importlib.util.module_from_spec(SPEC)
sys.modules["mutate"] = mutate  # dataclasses look up their module
SPEC.loader.exec_module(mutate)
MODULE = "def double(x):\n    return x + x\n\n\ndef half(x):\n    return x // 2\n"
TESTS = """import sys
sys.path.insert(0, "packages/one/src")
from one import double


def test_double():
    assert double(3) == 6
"""
TRY = """import sys, json
from pathlib import Path
sys.path.insert(0, {scripts!r})
import mutate
mutate.PRELOADED = ()
bugs = [mutate.Bug(**bug) for bug in json.loads(sys.argv[1])]
try:
    print(json.dumps([mutate.try_bug(bug, Path({tree!r}))["caught"] for bug in bugs]))
except mutate.TableError as error:
    print(json.dumps(str(error)))
"""


def make_bug(**changes):
    given = {"file": "packages/one/src/one.py", "snippet": "x + x", "replacement": "x * x"}
    return mutate.Bug(**{**given, "test": "tests/test_one.py::test_double", **changes})


@pytest.fixture
def tree(tmp_path):
    for name, text in (("packages/one/src/one.py", MODULE), ("tests/test_one.py", TESTS)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_every_snippet_and_test_of_the_table_is_in_the_tree():
    bugs = mutate.read_table()
    mutate.check(bugs)
    packages = {path.name for path in (ROOT / "packages").iterdir()}
    changed = {bug.file.split("/")[1] for bug in bugs if bug.file.startswith("packages/")}
    assert len(bugs) >= 60 and changed == packages


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"snippet": "x - x"}, "packages/one/src/one.py: the snippet must occur once, it occurs 0 times: 'x - x'"),
        ({"snippet": "(x):"}, "packages/one/src/one.py: the snippet must occur once, it occurs 2 times: '(x):'"),
        ({"file": "gone.py"}, "gone.py: the snippet must occur once, it occurs 0 times: 'x + x'"),
        ({"test": "tests/test_one.py::test_gone"}, "tests/test_one.py::test_gone: no such test"),
    ],
)
def test_outdated_entries_are_reported(tree, changes, said):
    mutate.check([make_bug()], tree)
    with pytest.raises(mutate.TableError) as error:
        mutate.check([make_bug(), make_bug(**changes)], tree)
    assert str(error.value) == said


def test_a_bug_is_caught_if_its_test_fails_and_only_then(tree):
    def attempt(*bugs):
        given = json.dumps([mutate.asdict(bug) for bug in bugs])
        code = TRY.format(scripts=str(ROOT / "scripts"), tree=str(tree))
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=True)
        assert (tree / "packages/one/src/one.py").read_text() == MODULE
        return json.loads(done.stdout)

    assert attempt(make_bug(), make_bug(snippet="x // 2", replacement="x // 3")) == [True, False]
    assert "the test did not run (exit code 4)" in attempt(make_bug(replacement="x +"))


def test_the_committed_outcome_has_every_bug_caught():
    bugs, path = mutate.read_table(), ROOT / "benchmarks/results/mutations.json"
    missing = len(bugs) - len(mutate.read_outcome(path, bugs))
    assert not missing, f"python scripts/mutate.py --new --out {path.relative_to(ROOT)}"
