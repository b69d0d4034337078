"""A run with a server, one of whose processes is stopped while it serves."""

import subprocess
import sys

from tests.end_to_end.conftest import Job

STOP = """
import os, signal
import psutil
from plasmid import hookimpl

@hookimpl
def batch_finished(batch, metrics):
    if batch == 1:
        own = psutil.Process().children(recursive=True)
        (stopped,) = [one for one in own if one.name().startswith("{name}")]
        os.kill(stopped.pid, signal.SIGSTOP)
"""


def hang_report_of(folder, model, rollout, name):
    """Train, stop the process with this name after the first batch, and return the path of the hang report.

    There are so many batches because the process continues when it writes its stacks, before the report is written.
    """
    recipe = Job(folder, model).write_recipe(30)
    (folder / "stopper.py").write_text(STOP.format(name=name))
    rollout = f"{{{rollout}, max_restarts=1, health_interval_s=1, health_timeout_s=5, health_failures=1}}"
    changes = [f"rollout={rollout}", "placement.device=cpu", "placement.start_timeout_s=900", "run.dir=run"]
    command = [sys.executable, "-m", "plasmid_cli", "train", str(recipe), *changes, "--plugin", "stopper.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (report,) = (folder / "run/hangs").glob("*/report.txt")
    assert "missed deadline: engine-0: health check (rollout.health_timeout_s)" in report.read_text()
    return report
