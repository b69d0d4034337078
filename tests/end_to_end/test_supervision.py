"""Every process of a supervised run is killed; the run ends bit for bit like an undisturbed one."""

import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from tests.supervised import Supervised, repeatable_metrics

PARTS = {
    "a trainer rank": (["trainer-1"], "trainer rank 1: trainer-1 died during "),
    "all trainer ranks": (["trainer-0", "trainer-1"], "trainer rank "),
    "the engine": (["engine-0"], "engine-0 died during "),
    "a rollout worker": (["rollout-worker-0"], "rollout-worker-0 died during "),
    "Ray's scheduler": (["raylet"], "Ray's scheduler (raylet), process "),
    "Ray's control process": (["gcs_server"], "Ray's control process (gcs_server), process "),
    "the driver": (["driver"], "killed by SIGKILL"),
}
SETTINGS = [
    "trainer.lr=3e-3",
    "placement.trainer_ranks=2",
    "checkpoint.every=1",
    "checkpoint.export=true",
]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_supervised_run_survives_the_death_of_every_part_and_ends_bit_for_bit_the_same(job, monkeypatch):
    recipe = job.write_recipe(batches=2 * len(PARTS) + 1).name
    plugin = job.folder / "digit_share.py"  # a batch takes longer than finding and killing a process
    slow = plugin.read_text().replace("return sum", "await asyncio.sleep(1.5); return sum")
    plugin.write_text(f"import asyncio\n{slow}")
    monkeypatch.chdir(job.folder)
    whole = [sys.executable, "-m", "plasmid_cli", "train", recipe, *SETTINGS, f"run.dir={job.folder / 'whole'}"]
    assert subprocess.run(whole, stdout=subprocess.DEVNULL, timeout=240, check=False).returncode == 0

    with Supervised(job.folder / "run", recipe, *SETTINGS) as run:
        for index, (names, _) in enumerate(PARTS.values()):
            run.wait_for_checkpoint(2 * index + 2)
            for part in [run.driver() if name == "driver" else run.part(name) for name in names]:
                part.kill()
        assert run.wait() == 0, run.output.read_text()

    lines = run.restarts()
    assert len(lines) == len(PARTS) == run.restarts_of_run(), lines
    for line, (_, cause) in zip(lines, PARTS.values(), strict=True):
        assert line.partition(": the run died in batch ")[2].partition(": ")[2].startswith(cause), line
        assert "; restart 1 of 5 in " in line  # a checkpoint in between resets the count
    assert repeatable_metrics(run.run) == repeatable_metrics(job.folder / "whole")
    weights = [load_file(folder / "final/model.safetensors") for folder in (run.run, job.folder / "whole")]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
