"""How the process that watches a driver's Ray recognizes the processes of this driver."""

import os
import subprocess
import sys
import time

import psutil
import pytest
from plasmid_runtime.cluster.watch.ray_watch import RayWatch, find_descendants, is_of_session

SLEEP = "import time; time.sleep(600)"
CHAIN = """
import os, sys, time
if os.fork() == 0 and os.fork() == 0:
    print(os.getppid(), os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def start():
    started = []

    def run(*words):
        started.append(subprocess.Popen([sys.executable, "-c", SLEEP, *words]))
        process = psutil.Process(started[-1].pid)
        while not set(words) <= set(process.cmdline()):  # wait until the program has replaced the fork
            time.sleep(0.01)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--session_dir=/tmp/ray/session_2026-11-22_21-58-11_885192_77", True),
        ("--log_dir=/tmp/ray/session_2026-11-22_21-58-11_885192_77/logs", True),
        ("--session-name=session_2026-11-22_21-58-11_885192_77", True),
        ("--session_dir=/tmp/ray/session_2026-11-22_21-58-11_885192_770", False),
        ("--session_dir=/tmp/ray/session_2026-11-22_21-58-11_77_5", False),
    ],
)
def test_a_daemon_is_known_by_the_session_of_its_driver(start, word, expected):
    process = start(word)
    assert is_of_session(process, 77) is expected


def test_closing_a_run_leaves_the_ray_of_another_run_that_its_driver_started(start, tmp_path):
    own = tmp_path / f"session_2026-11-22_21-58-11_885192_{os.getpid()}"
    other = tmp_path / "session_2026-11-22_21-58-12_885192_1"
    before = tmp_path / f"session_2026-11-21_21-58-11_885192_{os.getpid()}"
    before.mkdir()
    watch = RayWatch(tmp_path)
    mine, others = start(f"--session_dir={own}"), start(f"--session_dir={other}")
    own.mkdir()
    other.mkdir()
    watch.close()
    assert not mine.is_running() or mine.status() == psutil.STATUS_ZOMBIE
    assert others.status() != psutil.STATUS_ZOMBIE
    assert not own.exists()
    assert other.exists()
    assert before.exists()


def test_a_pipe_that_ends_does_not_kill_the_processes_of_a_driver_that_lives(start, tmp_path):
    watch = RayWatch(tmp_path)
    other = start("mine")
    watch._process.stdin.close()
    watch._process.wait(30)
    assert other.status() != psutil.STATUS_ZOMBIE


DRIVER = """
import subprocess, sys, time
from pathlib import Path
from plasmid_runtime.cluster.watch.ray_watch import RayWatch
folder = Path(sys.argv[1])
watch = RayWatch(folder / "ray")
upload = '''
import os, time
from pathlib import Path
driver = os.getppid()
Path("started").touch()
while os.getppid() == driver:
    time.sleep(0.1)
time.sleep(1)
Path("uploaded").touch()
time.sleep(600)
'''
started = [
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]),
    subprocess.Popen([sys.executable, "-c", upload], cwd=folder, start_new_session=True),
]
while not (folder / "started").exists():
    time.sleep(0.1)
time.sleep(2)  # until the watch has seen them
print(*(one.pid for one in started), flush=True)
time.sleep(600)
"""


def test_a_process_in_another_session_has_a_grace_period_after_the_driver_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as driver:
        children = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        driver.kill()
    plain, detached = children
    psutil.wait_procs([plain], timeout=30)
    assert not plain.is_running()
    psutil.wait_procs([detached], timeout=30)
    assert not detached.is_running()
    assert (tmp_path / "uploaded").exists()


def test_processes_of_daemons_are_found_without_listing_all_processes_of_the_machine(start, monkeypatch):
    root = subprocess.Popen([sys.executable, "-c", CHAIN], stdout=subprocess.PIPE, text=True)
    child, grandchild = (psutil.Process(int(word)) for word in root.stdout.readline().split())
    other, short = start("other"), subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    ended = psutil.Process(short.pid)
    short.communicate()
    monkeypatch.setattr(psutil, "pids", None)
    monkeypatch.setattr(psutil, "_ppid_map", None)
    own = {psutil.Process(root.pid), child, grandchild}
    assert find_descendants({*own, other, ended}, [psutil.Process(root.pid)]) == own
    assert find_descendants({*own, other, ended}, [grandchild, other]) == {grandchild, other}
    for process in own:
        process.kill()
    root.wait()
