"""Processes that start before their task exists."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil
import pytest
from plasmid_runtime.cluster.watch import stack_dumps
from plasmid_serving.processes import early

from tests.serving import early_program

ROOT = Path(__file__).parents[2]
SPAWN = multiprocessing.get_context("spawn")
TARGETS = {name: f"tests.serving.early_program:{name}" for name in ("report", "fail", "hang")}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts early processes, and returns their ids once they have imported the module."""
    imports = tmp_path / "imports"
    imports.touch()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("EARLY_IMPORTS", str(imports))
    monkeypatch.setattr(SpawnProcess, "_Popen", SpawnProcess.__dict__["_Popen"])
    monkeypatch.setattr(early, "_waiting", waiting := [])

    def start_all(*names, **options):
        early.start_early(*(TARGETS[name] for name in names), **options)
        wait_until(lambda: len(imports.read_text().split()) >= len(waiting))
        return [process.pid for process in waiting]

    yield start_all
    for process in waiting:
        process.end()


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def run_report(name):
    """Run the task. Returns its process, and the variable's values at the import and in the task."""
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(3)]
    process = SPAWN.Process(target=early_program.report, args=(name, [writer for _, writer in pipes]))
    process.start()
    for _, writer in pipes:
        writer.close()
    for reader, _ in pipes[:-1]:
        with pytest.raises(EOFError):
            reader.recv()
    values = pipes[-1][0].recv()
    process.join()
    assert process.exitcode == 0
    return process, values


def test_a_process_takes_over_the_one_that_has_imported_its_module(start, monkeypatch):
    first, second = start("report", "report")
    monkeypatch.setenv("ADDED_LATER", "value")
    assert [run_report("ADDED_LATER")[0].pid for _ in range(2)] == [first, second]
    assert not psutil.pid_exists(first)
    process, values = run_report("ADDED_LATER")  # as usual if none is left
    assert process.pid not in (first, second) and values == ("value", "value")


def test_the_parent_is_called_before_it_sends_the_task(start, monkeypatch):
    monkeypatch.delenv("SET_BEFORE_TASK", raising=False)
    (pid,) = start("report", before_task=lambda: monkeypatch.setenv("SET_BEFORE_TASK", "value"))
    process, values = run_report("SET_BEFORE_TASK")
    assert process.pid == pid and values == (None, "value")


def test_variables_added_later_are_those_of_the_task(start, monkeypatch):
    (pid,) = start("report")
    monkeypatch.setenv("ADDED_LATER", "value")
    process, values = run_report("ADDED_LATER")
    assert process.pid == pid and values == (None, "value")


def test_further_modules_are_imported_before_the_task(start, tmp_path, monkeypatch):
    file = tmp_path / "further"
    monkeypatch.setenv("EARLY_FURTHER", str(file))
    (pid,) = start("report", imports=["tests.serving.no_such_module", "tests.serving.early_further"])
    wait_until(lambda: file.exists() and file.read_text() == f"{pid}\n")
    assert run_report("ANY")[0].pid == pid


def test_a_process_starts_again_without_further_modules_if_one_fails(start, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("EARLY_FURTHER", str(tmp_path / "further"))
    monkeypatch.setenv("EARLY_FURTHER_FAILURE", "not before the task")
    (pid,) = start("report", imports=["tests.serving.early_further", "tests.serving.no_such_module"])
    monkeypatch.setenv("ADDED_LATER", "value")
    process, values = run_report("SET_BY_IMPORT")
    assert process.pid == pid and values == (None, None)
    assert (tmp_path / "imports").read_text() == f"{pid}\n" * 2  # the target's module, in two programs
    assert (tmp_path / "further").read_text() == f"{pid}\n"
    error = "cannot import tests.serving.early_further before the task: RuntimeError: not before the task"
    assert capfd.readouterr().err.count(error) == 1


@pytest.mark.parametrize("name", ["SET_BEFORE", "LD_PRELOAD", "READ_BY_AN_IMPORT"])
def test_changes_that_only_a_new_process_notices_start_one(start, monkeypatch, caplog, name):
    monkeypatch.setenv("SET_BEFORE", "value")
    (pid,) = start("report", read_by_imports=["READ_BY_AN_IMPORT"])
    value = f"{os.environ.get(name, '')}:/dev/null"
    monkeypatch.setenv(name, value)
    process, values = run_report(name)
    assert process.pid != pid and values == (value, value)
    assert caplog.messages == [
        f"tests.serving.early_program:report was started early, but needs a new process: {name} has changed"
    ]
    assert not psutil.pid_exists(pid)


def test_another_executable_starts_a_new_process(start, tmp_path, caplog):
    (pid,) = start("report")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexport ADDED_BY=script\nexec "{sys.executable}" "$@"')
    script.chmod(0o700)
    multiprocessing.set_executable(str(script))
    try:
        process, values = run_report("ADDED_BY")
    finally:
        multiprocessing.set_executable(sys.executable)
    assert process.pid != pid and values == ("script", "script")
    assert "another executable" in caplog.text


def test_a_process_that_ended_early_is_replaced(start, monkeypatch, caplog):
    monkeypatch.setenv("EARLY_FAILURE", "once")
    (pid,) = start("report")
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    monkeypatch.delenv("EARLY_FAILURE")
    process, _ = run_report("ANY")
    assert process.pid != pid and caplog.messages[0].endswith(": it has ended")


def test_the_parent_observes_and_ends_an_early_process_like_any_other(start):
    start("fail", "hang")
    failing, hanging = (SPAWN.Process(target=target) for target in (early_program.fail, early_program.hang))
    hanging.start()
    failing.start()
    multiprocessing.connection.wait([failing.sentinel], 60)
    failing.join()
    assert failing.exitcode == 7 and hanging.is_alive()
    hanging.terminate()
    hanging.join()
    assert hanging.exitcode == -signal.SIGTERM and not hanging.is_alive()
    hanging.close()


def test_a_process_of_another_target_ends_those_that_wait(start, caplog):
    pids = start("hang", "hang")
    process, _ = run_report("ANY")
    assert process.pid not in pids and not any(map(psutil.pid_exists, pids))
    assert caplog.text.count("was started early, but tests.serving.early_program:report starts before it") == 2


def test_stacks_of_a_process_are_available_before_and_during_its_task(start):
    (pid,) = start("hang")
    task = SPAWN.Process(target=early_program.hang)
    for function in ("in run_task", "in hang"):
        file = stack_dumps.find_stacks_file(pid)
        wait_until(lambda file=file, text=function: text in stack_dumps.dump_stacks({pid: file})[pid])
        if function == "in run_task":
            task.start()
    assert task.pid == pid
    task.kill()
    task.join()


def test_early_processes_end_with_their_parent(tmp_path):
    program = "from plasmid_serving.processes.early import start_early as s; import time; s('x:y'); time.sleep(1000)"
    (tmp_path / "x.py").write_text("import time; open('imported', 'w').close(); time.sleep(1000)")
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    wait_until((tmp_path / "imported").exists)
    children = psutil.Process(parent.pid).children()
    assert len(children) == 2  # with the resource tracker of multiprocessing
    parent.kill()
    parent.wait()
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)


FORKING = """
import json, multiprocessing, os, signal
from plasmid_serving.processes import early
early.start_early("task:run", "task:run", imports=["further"], fork=True)
import task
context = multiprocessing.get_context("spawn")
early_pids = [process.pid for process in early._waiting]
os.environ["ADDED_LATER"] = "value"
found = []
for _ in early_pids:
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=task.run, args=(writer,))
    process.start()
    found.append((process.pid, *reader.recv()))
    multiprocessing.connection.wait([process.sentinel], 60)
    process.join()
    assert process.exitcode == 7
early.start_early("task:run", fork=True)
print(json.dumps([os.getpid(), early_pids, found, early._waiting[0].pid]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
TASK = """
import os, threading
with open("imports", "a") as file:
    print(os.getpid(), file=file)
if "THREAD_AT_IMPORT" in os.environ:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def run(writer):
    import further
    writer.send((os.getpid(), os.environ["ADDED_LATER"], further.PID))
    raise SystemExit(7)
"""


@pytest.mark.parametrize("has_thread", [False, True])
def test_forks_share_the_import_of_their_parent_unless_it_starts_a_thread(has_thread, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "further.py").write_text("import os\nPID = os.getpid()\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    if has_thread:
        environment["THREAD_AT_IMPORT"] = "1"
    ended = subprocess.run(
        [sys.executable, "-c", FORKING], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL
    parent, pids, found, waiting = json.loads(ended.stdout)
    assert len({parent, *pids}) == 3
    assert found == [[pid, pid, "value", pid] for pid in pids]
    wait_until(lambda: not psutil.pid_exists(waiting) or psutil.Process(waiting).status() == psutil.STATUS_ZOMBIE)
    imports = set(map(int, (tmp_path / "imports").read_text().split()))
    assert imports >= {parent, *pids} if has_thread else imports == {parent}
