"""A server that hangs: the stacks of its processes are in the run's folder before it is restarted."""

import subprocess
import sys

import pytest

from tests.end_to_end.conftest import Job

STOP = """
import os, signal
import psutil
from plasmid import hookimpl

@hookimpl
def batch_finished(batch, metrics):
    if batch == 1:
        own = psutil.Process().children(recursive=True)
        (scheduler,) = [one for one in own if one.name().startswith("sglang::scheduler")]
        os.kill(scheduler.pid, signal.SIGSTOP)
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_stopped_scheduler_is_named_with_the_stacks_of_its_server(sglang, tiny_model, tmp_path):
    recipe = Job(tmp_path, tiny_model).write_recipe(3)
    (tmp_path / "stopper.py").write_text(STOP)
    rollout = "{kind='sglang', dtype='float32', server_args={max_total_tokens=4096}, max_restarts=1, "
    rollout += "health_interval_s=1, health_timeout_s=5, health_failures=1}"
    changes = [f"rollout={rollout}", "placement.device=cpu", "placement.start_timeout_s=900", "run.dir=run"]
    command = [sys.executable, "-m", "plasmid_cli", "train", str(recipe), *changes, "--plugin", "stopper.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = (tmp_path / "run/hangs").glob("*/report.txt")
    text = report.read_text()
    assert "no end of engine-0: health check (rollout.health_timeout_s)" in text
    assert "  engine-0/sglang::scheduler (process " in text and "): stopped by a signal; " in text
    assert "_watchdog" not in text
    for name, function in (("scheduler", "in event_loop"), ("detokenizer", "in event_loop"), ("python", "in serve")):
        (file,) = report.parent.glob(f"engine-0-*{name}*.txt")
        assert function in file.read_text(), name
