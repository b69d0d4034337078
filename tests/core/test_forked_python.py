"""Forks of the server that has imported the libraries of workers behave like new processes."""

import json
import subprocess
import sys

import pytest

from tests import forked_python

CODE = """
import json, os, sys
found = [sys.stdin.readline(), sys.argv, os.getcwd(), os.environ.get("SOME"), "HOME" in os.environ]
print(json.dumps([*found, os.getsid(0) == os.getpid(), hash("text")]))
sys.exit(3)
"""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "SOME": "value"}
OPTIONS = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
OPTIONS |= {"env": ENVIRONMENT, "start_new_session": True}


def report(popen):
    """Return what a process says of itself, and its exit code."""
    process = popen([sys.executable, "-c", CODE, "more"], **OPTIONS)
    assert process.poll() is None
    with process.stdin, process.stdout as output:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        return json.load(output), process.wait(60), process.returncode


@pytest.mark.parametrize("popen", [forked_python.Popen, forked_python.SmallPopen])
def test_a_fork_has_the_arguments_files_and_environment_of_a_new_process(tmp_path, monkeypatch, popen):
    monkeypatch.chdir(tmp_path)
    assert report(popen) == report(subprocess.Popen)


@pytest.mark.parametrize("popen", [forked_python.SmallPopen, subprocess.Popen])
def test_a_fork_can_be_killed(popen):
    process = popen([sys.executable, "-c", "input()"], **OPTIONS)
    with process.stdin, process.stdout:
        process.kill()
    assert process.wait(60) == -9
    process.kill()  # has ended, which is no error
