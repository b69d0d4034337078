"""Kills `rl train` while a checkpoint is written in the background, and checks the resumed run."""

import os
import signal
import subprocess
import sys

from plasmid_runtime.observe.journal import read_journal

HOLD = """
import sys, time
from pathlib import Path
from plasmid import hookimpl

def hold(event, arguments):
    if event == "open" and "/.tmp-000004/trainer/" in str(arguments[0]) and str(arguments[0]).endswith(".distcp"):
        while Path("hold").exists():
            time.sleep(0.05)

sys.addaudithook(hold)

@hookimpl
def register_components():
    return []
"""


def rl(folder, *arguments):
    command = [sys.executable, "-m", "plasmid_cli", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1000)
    return done.returncode, done.stdout, done.stderr


def curve(folder):
    kept = ("train/", "reward/")
    entries = read_journal(folder / "metrics.jsonl")
    return [{k: v for k, v in entry.metrics.items() if k.startswith(kept)} for entry in entries]


def check_killed_while_saving(folder, recipe):
    """Block writing the tensors of batch 4 until the run is killed in a later batch.

    The recipe has a plugin `digit_share.py` and saves every second batch. The run that resumes from batch 2 must equal
    one that saved synchronously and was not killed.
    """
    behind = ("train", recipe, "trainer.async_save=true", "run.batches=6", "checkpoint.export=false")
    code, _, err = rl(folder, "train", recipe, "run.dir=whole", "run.batches=6", "checkpoint.export=false")
    assert code == 0, err
    (folder / "hold.py").write_text(HOLD)
    (folder / "hold").touch()
    command = [sys.executable, "-m", "plasmid_cli", *behind, "run.dir=cut", 'plugins=["digit_share.py","hold.py"]']
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True)
    told = []
    for line in process.stdout:
        told.append(line)
        if line.startswith("batch 5/6  reward"):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert any(line.startswith("batch 4/6  saving in the background") for line in told), told
    saved = folder / "cut/checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == [".tmp-000004", "batch-000002"]
    (folder / "hold").unlink()
    code, _, err = rl(folder, *behind, "run.dir=cut", 'plugins=["digit_share.py","hold.py"]', "--resume")
    assert code == 0, err
    assert sorted(path.name for path in saved.iterdir()) == ["batch-000004", "batch-000006"]
    assert curve(folder / "cut") == curve(folder / "whole")
    waited = [entry.metrics for entry in read_journal(folder / "cut/metrics.jsonl")]
    assert any("perf/save_blocked_s" in metrics for metrics in waited)
    code, out, err = rl(folder, "convert", "--check", "cut/checkpoints/batch-000006", "whole/checkpoints/batch-000006")
    assert (code, out) == (0, "21 tensors are equal, 0 differ\n"), err
