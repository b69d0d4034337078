"""Tests of `tests/forked_workers.py`, which runs the tests in forks: each runs pytest on a few files of its own."""

import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
CONFTEST = """
import os
import pytest

@pytest.fixture(scope="session")
def logged():
    yield lambda text: os.write(descriptor, f"{text} {os.getpid()}\\n".encode())
    os.write(descriptor, f"session {os.getpid()}\\n".encode())

@pytest.fixture(scope="module", autouse=True)
def module(request, logged):
    yield
    logged(f"module {request.node.name}")

descriptor = os.open(os.environ["TOLD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(descriptor, f"collected {os.getpid()}\\n".encode())
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest on these files; return the process and lines that the tests wrote, each as words."""

    def run(*options, **files):
        told, folder = tmp_path / "told.txt", tmp_path / "files"
        for name, text in ({"conftest": CONFTEST} | files).items():
            path = folder / f"{name}.py"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text)
        told.write_text("")
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", folder, "-p", "tests.forked_workers"]
        command += [folder, "--import-mode=importlib", "-o", f"cache_dir={tmp_path / 'cache'}", *options]
        env = os.environ | {"PYTHONPATH": str(ROOT), "TOLD": str(told), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        env.pop("PYTEST_ADDOPTS", None)
        ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
        return ended, [line.split() for line in told.read_text().splitlines()]

    return run


def outcomes(path):
    """Return the outcome of each test in a JUnit file: the name of its first child, ``passed`` without one."""
    cases = xml.etree.ElementTree.parse(path).iter("testcase")
    return {case.get("name"): next((child.tag for child in case), "passed") for case in cases}


def test_forks_run_whole_files_and_report_what_happened(run, tmp_path):
    """One collection; two forks; failures, errors, warnings, captured output and the fixtures of sessions."""
    ended, told = run(
        "--workers=2",
        f"--junitxml={tmp_path / 'out.xml'}",
        "-Werror::RuntimeWarning",
        "-Werror::pytest.PytestUnraisableExceptionWarning",
        test_a="""
import os, random, time, warnings, pytest
def test_passes(logged, tmp_path): logged(f"a {random.random()} {tmp_path.parent.name}"); time.sleep(0.5)
def test_fails(logged): logged("a"); print("printed by a"); assert 1 == 2
def test_warns():
    class NotPickled(UserWarning): pass
    warnings.warn(NotPickled("a warning of a"))
async def never(): pass
def test_forgets(): never()
@pytest.mark.skip(reason="no")
def test_is_skipped(): pass
""",
        test_b="""
import random, threading, time, pytest
def test_leaves_a_thread(): threading.Thread(target=time.sleep, args=(600,)).start()
def test_logs(logged, tmp_path): logged(f"b {random.random()} {tmp_path.parent.name}"); time.sleep(0.5)
@pytest.fixture
def broken(): raise ValueError("broken fixture")
def test_errors(broken): pass
""",
    )
    assert ended.returncode == 1
    expected = {"test_passes": "passed", "test_fails": "failure", "test_warns": "passed", "test_is_skipped": "skipped"}
    expected |= {"test_forgets": "failure", "test_leaves_a_thread": "passed"}
    expected |= {"test_logs": "passed", "test_errors": "error"}
    assert outcomes(tmp_path / "out.xml") == expected
    for text in ("printed by a", "assert 1 == 2", "broken fixture", "NotPickled: a warning of a", "never awaited"):
        assert text in ended.stdout
    assert "2 failed, 4 passed, 1 skipped, 1 warning, 1 error" in ended.stdout
    ((_, collector),) = [line for line in told if line[0] == "collected"]
    (first, number, folder, a), (second, other, other_folder, b) = [line for line in told if len(line) == 4]
    assert {first, second} == {"a", "b"} and len({a, b, collector}) == 3
    assert number != other and folder != other_folder
    assert sorted(told)[-2:] == sorted([["session", a], ["session", b]])
    assert ["module", "test_a.py", a if first == "a" else b] in told


def test_a_worker_keeps_to_a_folder_that_it_has_begun(run):
    """Each waits until the other has begun its first file."""
    text = """
import os, time
def test(logged):
    logged("{}")
    while "{}" not in open(os.environ["TOLD"]).read(): time.sleep(0.01)
"""
    waits = {"a/test_1": "b/1", "a/test_2": "a/1", "b/test_1": "a/1", "b/test_2": "b/1"}
    files = {name: text.format(name.replace("test_", ""), other) for name, other in waits.items()}
    ended, told = run("--workers=2", **files)
    workers = dict(line for line in told if "/" in line[0])
    assert ended.returncode == 0 and workers["a/1"] == workers["a/2"] != workers["b/1"] == workers["b/2"]


def test_tests_of_one_group_run_in_one_worker(run):
    """Although they are in two files, and another worker is idle."""
    group = "\ndef pytest_collection_modifyitems(items):\n    for item in items: item.group = 'one'\n"
    text = "import time\ndef test(logged): logged('ran'); time.sleep(0.5)\ndef test_more(): pass\n"
    ended, told = run("--workers=2", conftest=CONFTEST + group, test_a=text, test_b=text)
    assert ended.returncode == 0 and len({line[1] for line in told if line[0] == "ran"}) == 1


def test_a_worker_that_dies_fails_its_test_and_is_replaced(run, tmp_path):
    ended, _ = run(
        "--workers=1",
        f"--junitxml={tmp_path / 'out.xml'}",
        test_a="import os\ndef test_first(): pass\ndef test_dies(): os.kill(os.getpid(), 9)\ndef test_last(): pass\n",
        test_b="import os\ndef test_exits(): os._exit(0)\n",
        test_c="def test_other(): pass\n",
    )
    expected = {"test_first": "passed", "test_dies": "failure", "test_last": "passed", "test_other": "passed"}
    assert ended.returncode == 1 and outcomes(tmp_path / "out.xml") == expected | {"test_exits": "failure"}
    assert "ended with code -9" in ended.stdout and "ended with code 0" in ended.stdout


def test_a_run_stops_after_a_failure_and_repeats_it(run):
    files = {f"test_{name}": "def test(logged): logged('ran')\n" for name in "bcd"}
    files["test_a"] = "def test(): assert False\ndef test_after(logged): logged('ran')\n"
    ended, told = run("--workers=1", "-x", **files)
    assert ended.returncode == 1 and "1 failed in" in ended.stdout
    assert "ran" not in [line[0] for line in told]
    ended, told = run("--workers=1", "--lf", "-v")
    assert "1 failed in" in ended.stdout or "1 failed, " in ended.stdout
    assert "ran" not in [line[0] for line in told]


def test_an_interrupted_run_ends_its_fixtures(run):
    """SIGINT for the whole run and for pytest alone."""
    interrupt = "import os, signal, time\ndef test(logged):\n    logged('ran')\n    os.kill({}, signal.SIGINT)\n"
    for pid in ("os.getpid()", "os.getppid()"):
        ended, told = run("--workers=2", test_a=interrupt.format(pid) + "    time.sleep(60)\n")
        assert ended.returncode == 2
        assert [line[0] for line in told] == ["collected", "ran", "module", "session"]
