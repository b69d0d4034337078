"""Two processes never write to the same run folder."""

import os
import signal
import subprocess
import sys

import pytest
from plasmid.errors import ConfigError
from plasmid_runtime.checkpoint.run_folder import lock_folder

HOLD = """
import sys, time
from pathlib import Path
from plasmid_runtime.checkpoint.run_folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_folder_in_use_is_refused_with_the_process_that_has_it(runner, holder):
    for mode in ({}, {"resume": True}):
        if mode:
            (runner.folder / "run/config.json").write_text("{}")
        with pytest.raises(ConfigError, match=rf"is in use by process {holder.pid} on \S+; wait until it ends"):
            runner.run({"run": {"batches": 1}}, **mode)
    assert not (runner.folder / "run/metrics.jsonl").exists()


def test_a_killed_process_gives_its_folder_back(runner, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert runner.run({"run": {"batches": 1}}).steps == 1


def test_a_finished_run_gives_its_folder_back(runner):
    runner.run({"run": {"batches": 1}})
    with lock_folder(runner.folder / "run"):
        pass
