"""Power loss during a run of the real trainer and engine: exports and checkpoints are complete once they have their
name."""

import random
import shutil

import pytest
from plasmid_models.manifest import describe_damage
from plasmid_runtime.checkpoint.folder import CheckpointFolder
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.end_to_end.conftest import Job
from tests.end_to_end.test_exactness import curve, samples
from tests.synced_disk import Disk

SETTINGS = {
    "checkpoint": {"every": 2, "keep_last": 2, "export": True, "export_every": 2},
    "run": {"batches": 4},
    "eval": [],
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_model):
    """A whole run, and the state of the disk at every moment of it."""
    job = Job(tmp_path_factory.mktemp("recorded"), tiny_model)
    disk = Disk(job.folder)
    with pytest.MonkeyPatch.context() as monkeypatch, disk.recorded(monkeypatch):
        job.run(SETTINGS)
    return job, disk


def read_folder(path):
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def restore(recorded, moment, target, chance=None):
    job, disk = recorded
    shutil.rmtree(target, ignore_errors=True)
    disk.restore(moment, "run", job.folder.stat().st_ino, target, chance=chance)


def test_exports_and_checkpoints_are_on_disk_before_they_are_named_complete(recorded):
    job, disk = recorded
    target, whole, seen = job.folder / "left", job.folder / "run", set()
    for moment in range(len(disk.moments)):
        for chance in (None, moment):
            restore(recorded, moment, target, chance)
            for checkpoint in CheckpointFolder.list_complete(target / "checkpoints"):
                assert describe_damage(checkpoint) is None
            for name in ("final", "exports/batch-000002", "exports/batch-000004"):
                named = target / name / "plasmid.json"
                if named.is_file() and named.read_bytes() == (whole / name / "plasmid.json").read_bytes():
                    assert read_folder(target / name) == read_folder(whole / name), (name, moment, chance)
                    seen.add(name)
    assert seen == {"final", "exports/batch-000002", "exports/batch-000004"}
    restore(recorded, len(disk.moments) - 1, target)
    assert {"config.json", "tokenizer.json", "model.safetensors", "plasmid.json"} <= set(read_folder(target / "final"))
    AutoModelForCausalLM.from_pretrained(target / "final")
    AutoTokenizer.from_pretrained(target / "final")


def test_a_run_that_lost_unsynced_writes_continues_bit_by_bit(recorded):
    job, disk = recorded
    for chance, moment in enumerate(random.Random(0).sample(range(len(disk.moments)), 2)):
        restore(recorded, moment, job.folder / "left", chance)
        job.run(SETTINGS | {"run": {"batches": 4, "dir": str(job.folder / "left")}}, resume="auto")
        assert curve(job.metrics("left")) == curve(job.metrics())
        assert samples(job.folder / "left") == samples(job.folder / "run")
        assert read_folder(job.folder / "left/final") == read_folder(job.folder / "run/final")
