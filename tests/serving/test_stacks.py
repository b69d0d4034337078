"""Stacks of the processes of a server, requested from outside."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from plasmid_runtime.cluster.watch import stack_dumps
from plasmid_runtime.cluster.watch.inspection import inspect_process
from plasmid_serving.dialect import Program
from plasmid_serving.processes.launch import API_KEY_VARIABLE
from plasmid_serving.processes.server import spawn

NAMES = ["scheduler", "detokenizer", "deaf", "sleep", "server"]


@pytest.fixture
def pids(tmp_path, monkeypatch):
    """Return the process ids of a running program, by name."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}")
    file = tmp_path / "pids"
    program = Program("server_program:serve", {"file": str(file)})
    process = spawn(program, tmp_path / "arguments.json", tmp_path / "server.log", env={API_KEY_VARIABLE: ""})
    while not file.exists() or len(file.read_text().splitlines()) < len(NAMES):
        assert process.poll() is None, (tmp_path / "server.log").read_text()
        time.sleep(0.05)
    yield {name: int(pid) for name, pid in (line.split() for line in file.read_text().splitlines())}
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_every_process_of_a_server_is_asked_for_its_stacks(pids, tmp_path):
    os.kill(pids["scheduler"], signal.SIGSTOP)
    while psutil.Process(pids["scheduler"]).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    snapshot = inspect_process(os.getpid(), tmp_path / "none.log", with_stacks=False)
    states = {one.pid: one for one in snapshot.servers}
    for name, function in (("server", "answer"), ("scheduler", "schedule"), ("detokenizer", "detokenize")):
        assert f"in {function}\n" in states[pids[name]].stacks, name
    stopped = states[pids["scheduler"]]
    assert stopped.condition == "stopped by a signal" and stopped.position.startswith("schedule (server_program.py:")
    assert not states[pids["server"]].condition and not states[pids["server"]].position
    deaf = states[pids["deaf"]]
    assert deaf.condition == "not responding"
    assert deaf.stacks.startswith(f"process {pids['deaf']} ({psutil.Process(pids['deaf']).name()}) writes no stacks\n")
    assert "State:\tS (sleeping)" in deaf.stacks and f"thread {pids['deaf']} (" in deaf.stacks
    assert pids["sleep"] not in states  # the signal would end it
    assert f"  {pids['sleep']} sleeping, in the kernel at " in snapshot.text
    assert psutil.Process(pids["sleep"]).is_running()


def test_stacks_are_those_of_the_moment(pids, tmp_path):
    for _ in range(2):
        (server,) = (
            one
            for one in inspect_process(os.getpid(), tmp_path, with_stacks=False).servers
            if one.pid == pids["server"]
        )
        assert server.stacks.count("in answer\n") == 1


def test_stacks_written_before_a_process_is_killed_are_kept(pids, tmp_path, monkeypatch):
    """As happens if a weight sync fails meanwhile and restarts the server."""
    file = stack_dumps.find_stacks_file(pids["scheduler"])
    kill = os.kill

    def kill_after_writing(pid, number):
        kill(pid, number)
        if (pid, number) == (pids["scheduler"], signal.SIGCONT):
            wait_until(lambda: "in main\n" in file.read_text() or "<module>" in file.read_text())
            kill(pid, signal.SIGKILL)
            wait_until(lambda: not file.exists())

    monkeypatch.setattr(os, "kill", kill_after_writing)
    assert "in schedule\n" in stack_dumps.dump_stacks({pids["scheduler"]: file})[pids["scheduler"]]


def wait_until(condition):
    while not condition():
        time.sleep(0.01)
