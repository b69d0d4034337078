"""Runs of trainer `fsdp` that write checkpoints while they train."""

import threading

import pytest
from plasmid_fsdp.backend import FSDPBackend
from plasmid_fsdp.saving import PendingSave
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.end_to_end.killed_saves import check_killed_while_saving


def test_a_second_save_waits_for_the_first(job, monkeypatch):
    """The files of batch 1 are written after batch 2 was trained; only then does the save of batch 2 start."""
    events, trained = [], threading.Event()
    write, commit, save = FileSystemWriter.write_data, PendingSave.commit, FSDPBackend.save
    metrics = FSDPBackend.step_metrics

    def count_steps(self):
        events.append("step")
        if events.count("step") > 1:
            trained.set()
        return metrics(self)

    def begin(self, path, steps):
        events.append("save")
        return save(self, path, steps)

    def write_late(self, plan, planner):
        if "written" not in events:
            trained.wait()
            threading.Event().wait(0.3)  # a save that did not wait would start now
        events.append("written")
        return write(self, plan, planner)

    def commit_late(self, written):
        commit(self, written)
        events.append("committed")

    monkeypatch.setattr(FSDPBackend, "step_metrics", count_steps)
    monkeypatch.setattr(FSDPBackend, "save", begin)
    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    monkeypatch.setattr(PendingSave, "commit", commit_late)
    loop = {"batches": 2, "prompts_per_batch": 2, "samples_per_prompt": 2}
    saving = {"every": 1, "export": False}
    job.run({"run": loop, "trainer": {"async_save": True}, "checkpoint": saving, "eval": []})
    saved = ["save", "written", "committed"]
    assert events == ["step", "save", "step", *saved[1:], *saved]
    assert sorted(path.name for path in (job.folder / "run/checkpoints").iterdir()) == ["batch-000001", "batch-000002"]


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_a_run_killed_while_a_checkpoint_is_written_resumes_bit_by_bit_from_the_one_before(job):
    recipe = job.write_recipe(6)
    changed = recipe.read_text().replace('trainer.kind = "fsdp"', 'trainer = { kind = "fsdp", lr = 3e-3 }')
    changed = changed.replace("at_end = false, export = false", "every = 2")
    recipe.write_text(f"{changed}\n            placement = {{ trainer_ranks = 2, start_timeout_s = 900 }}\n")
    check_killed_while_saving(job.folder, recipe.name)
