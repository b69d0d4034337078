"""Resume: a resumed run equals one that was never stopped."""

import asyncio
import json
import shutil
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from plasmid.components import AdapterSpec, PromptStream, TrainerConfig
from plasmid.config.loop import CheckpointConfig
from plasmid.config.run import RoleConfig
from plasmid.errors import CheckpointError, ConfigError
from plasmid.plugins.hookspecs import hookimpl
from plasmid.testing.fakes import FakeTrainer
from plasmid.testing.rewards import make_prompt
from plasmid.types.runs import Mode
from plasmid_runtime.checkpoint.folder import CheckpointFolder, RunState
from plasmid_runtime.checkpoint.saver import CheckpointSaver
from plasmid_runtime.lifecycle import preparation
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_runtime.rollout.producers.buffer import OldestFirst
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_runtime.rollout.producers.producer import DropLimit
from plasmid_runtime.rollout.producers.stream import StreamProducer
from safetensors.numpy import save_file

SETTINGS = {"filters": [{"kind": "even-group"}], "checkpoint": {"every": 2, "keep_last": 10}}
TIMES = ("perf/", "memory/", "gpu/", "engine/", "sync/transfer_s")


def curve(runner, name="run"):
    return [{k: v for k, v in m.items() if not k.startswith(TIMES)} for m in runner.metrics(name)]


def tokens(runner, step, name="run"):
    groups = read_samples(runner.folder / name / "samples" / f"batch-{step:06d}.parquet")
    return [(g.id, g.prompt.id, s.id, s.token_ids.tolist()) for g in groups for s in g.samples]


@pytest.fixture(scope="module")
def whole(shared_runner):
    """A run with `SETTINGS` that was never stopped."""
    shared_runner.run(SETTINGS)
    return shared_runner


@pytest.mark.parametrize("at", [2, 4, pytest.param(6, marks=pytest.mark.long)])
def test_a_resumed_run_equals_one_that_was_never_stopped(whole, at):
    cut = whole.copy_cut_run(at)
    for step in range(at + 1, 9):
        (cut / f"samples/batch-{step:06d}.parquet").unlink()
    result = whole.run({**SETTINGS, "run": {"dir": str(cut)}}, resume=True)
    assert result.steps == 8
    assert curve(whole, cut.name) == curve(whole)
    for step in range(1, 9):
        assert tokens(whole, step, cut.name) == tokens(whole, step)


class StopAt:
    """Simulates Ctrl-C when a phase of a batch begins."""

    def __init__(self, batch, phase):
        self.at = (batch, phase)
        self.loop = None

    @hookimpl
    def phase_started(self, batch, phase):
        if (batch, phase) == self.at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("phase", ["sample", "train", "sync"])
def test_ctrl_c_saves_and_the_run_continues_exactly(whole, runner, phase):
    slow = {**SETTINGS, "trainer": {"seconds": 0.02}, "rollout": {"max_delay_s": 0.05}}
    result = runner.run(slow, observers=(StopAt(3, phase),))
    assert result.interrupted
    assert result.steps < 8
    assert result.checkpoint is not None
    assert not runner.run(slow, resume=True).interrupted
    assert curve(runner) == curve(whole)
    assert [tokens(runner, step) for step in range(1, 9)] == [tokens(whole, step) for step in range(1, 9)]


def test_an_asynchronous_run_resumes_with_its_buffered_groups(runner):
    settings = {
        "run": {"max_staleness": 2, "batches": 6, "seed": 1},
        "checkpoint": {"every": 3},
        "data": {"shuffle": False},
    }
    runner.run({**settings, "run": {**settings["run"], "batches": 3}})
    runner.run(settings, resume=True)
    ids = [
        g.id for step in range(1, 7) for g in read_samples(runner.folder / "run/samples" / f"batch-{step:06d}.parquet")
    ]
    assert len(ids) == len(set(ids)) == 24
    assert set(ids) >= set(range(20))


def test_retention_keeps_the_last_and_every_nth(runner):
    runner.run({"checkpoint": {"every": 1, "keep_last": 2, "keep_every": 3}})
    names = sorted(path.name for path in (runner.folder / "run" / "checkpoints").iterdir())
    assert names == ["batch-000003", "batch-000006", "batch-000007", "batch-000008"]


def test_an_interrupted_save_is_no_checkpoint(runner):
    runner.run({"checkpoint": {"every": 4}})
    folder = runner.folder / "run" / "checkpoints"
    (folder / "batch-000008" / "state.json").unlink()
    (folder / ".tmp-000009").mkdir()
    result = runner.run({"checkpoint": {"every": 4}, "run": {"batches": 9}}, resume=True)
    assert result.steps == 9
    assert not (folder / ".tmp-000009").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"run": {"seed": 7, "batches": 9}},
            r"run.seed: must not change on resume, was 0, got 7; change it back",
        ),
        (
            {"run": {"batches": 9}, "rewards": [{"kind": "digits", "weight": 2.0}]},
            r"must not change on resume, was 1.0, got 2.0",
        ),
    ],
)
def test_resume_refuses_what_would_be_another_run(runner, change, message):
    runner.run({"run": {"batches": 8}})
    with pytest.raises(CheckpointError, match=message):
        runner.run(change, resume=True)


def test_resume_without_a_run_is_an_error(runner):
    with pytest.raises(CheckpointError, match=r"has no run to resume; start without --resume"):
        runner.run(resume=True)


def test_a_run_folder_is_not_overwritten(runner):
    runner.run({"run": {"batches": 1}})
    with pytest.raises(Exception, match=r"already has a run; continue it with --resume"):
        runner.run({"run": {"batches": 1}})


def test_the_state_is_plain_json(runner):
    runner.run({"checkpoint": {"every": 4}})
    state = json.loads((runner.folder / "run/checkpoints/batch-000008/state.json").read_text())
    assert state["batch"] == state["version"] == 8


class Numbers(PromptStream):
    """A prompt stream that counts."""

    def __init__(self):
        self.next = 0

    def draw(self):
        self.next += 1
        return self.prompt(str(self.next))

    def prompt(self, id):
        return make_prompt(id=id)

    def state(self):
        return {"next": self.next}

    def restore(self, state):
        self.next = state["next"]


async def never(draw):
    await asyncio.sleep(3600)


def test_draws_whose_rollouts_still_run_are_drawn_again_after_a_resume():
    async def save():
        limit = DropLimit(limit=9, failed_limit=9)
        stream = StreamProducer(
            Draws(Numbers()), never, slots=4, max_staleness=1, sync_every=1, limit=limit, policy=OldestFirst()
        )
        stream.release(0, version=0)
        await asyncio.sleep(0)
        state, _ = await stream.snapshot()
        await stream.close()
        return state

    state = asyncio.run(save())
    assert [item["id"] for item in state["pending"]] == [0, 1, 2, 3]
    again = Draws(Numbers())

    async def draw():
        await again.restore(state)
        return await again.draw(5)

    drawn = asyncio.run(draw())
    assert [(draw.id, draw.prompt.id) for draw in drawn] == [(i, str(i + 1)) for i in range(5)]


def test_an_evaluation_before_the_first_batch_is_not_repeated_on_a_resume(runner):
    slow = {
        "rollout": {"max_delay_s": 0.2},
        "eval": [{"name": "few", "data": {"path": str(runner.folder / "prompts.jsonl") + "@[0:3]"}, "every": 4}],
    }
    stopped = runner.run(slow, observers=(StopAt(1, "train"),))
    assert stopped.interrupted and stopped.steps < 4
    result = runner.run(slow, resume=True)
    assert [step for step, _ in result.evaluations["few"]] == [0, 4, 8]


def test_evaluations_past_the_checkpoint_are_made_again(runner):
    changes = {
        "checkpoint": {"every": 2, "keep_last": 10},
        "eval": [{"name": "few", "data": {"path": str(runner.folder / "prompts.jsonl") + "@[0:3]"}, "every": 3}],
    }
    whole = runner.run(changes)
    for step in (4, 6, 8):
        shutil.rmtree(runner.folder / "run" / "checkpoints" / f"batch-{step:06d}")
    result = runner.run(changes, resume=True)
    assert result.evaluations == whole.evaluations
    assert [step for step, _ in result.evaluations["few"]] == [0, 3, 6, 8]


def test_a_checkpoint_that_is_being_removed_is_none(tmp_path):
    folder = CheckpointFolder(tmp_path, CheckpointConfig(keep_last=1))
    state = {"version": 1, "producer": {}, "components": {}, "config": {}}
    first = folder.commit(folder.begin(1), RunState(batch=1, **state))
    (first / "trainer").mkdir()
    seen = []

    def watch(*args):
        seen.append(first in folder.list_all())

    sys.addaudithook(lambda event, args: watch() if event == "shutil.rmtree" and str(args[0]) == str(first) else None)
    folder.commit(folder.begin(2), RunState(batch=2, **state))
    assert seen == [False]
    assert not first.exists()


def test_a_signal_before_the_first_batch_of_a_resumed_run_leaves_its_checkpoint_alone(runner):
    runner.run({"run": {"batches": 4}})
    file = runner.folder / "run/checkpoints/batch-000004/state.json"
    before = file.stat()
    with pytest.raises(KeyboardInterrupt):
        runner.run({"run": {"batches": 8}}, observers=(StopAt(4, "sync"),), resume=True)
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert file.stat().st_ino == before.st_ino


def test_resume_auto_starts_anew_where_nothing_was_saved_and_continues_otherwise(whole, make_runner, caplog):
    cut = make_runner("cut")
    run = cut.folder / "run"
    cut.run(SETTINGS, resume="auto")  # there is no folder yet
    assert "no checkpoint to resume from; starting a new run" in caplog.text
    shutil.rmtree(run / "checkpoints")  # as if it had been killed before the first save
    (run / "samples" / "batch-000099.parquet").write_bytes(b"of the killed run")
    with pytest.raises(CheckpointError, match=r"ended before it saved one; start again in its folder with --resume=au"):
        cut.run(SETTINGS, resume=True)
    assert cut.run(SETTINGS, resume="auto").steps == 8
    assert curve(cut) == curve(whole) and not (run / "samples" / "batch-000099.parquet").exists()
    shutil.rmtree(run / "checkpoints" / "batch-000008")
    caplog.clear()
    assert cut.run(SETTINGS, resume="auto").steps == 8
    assert curve(cut) == curve(whole) and "starting a new run" not in caplog.text


def test_resume_auto_without_a_folder_takes_the_newest_run_with_a_checkpoint_or_a_new_one(
    runner, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    auto = {"run": {"dir": "auto", "batches": 2}}
    first = runner.run(auto, resume="auto").run_dir
    assert runner.run(auto, resume="auto").run_dir == first
    shutil.rmtree(first / "checkpoints")
    assert runner.run(auto, resume="auto").run_dir not in (first, None)


def test_resume_auto_continues_a_run_that_saved_before_the_lock_was_taken(runner, monkeypatch):
    runner.run({"run": {"batches": 2}})
    before = (runner.folder / "run/metrics.jsonl").read_bytes()
    monkeypatch.setattr(
        preparation, "find_resumable_folder", lambda config: None
    )  # as it was before the other run saved
    assert runner.run({"run": {"batches": 3}}, resume="auto").steps == 3
    assert (runner.folder / "run/metrics.jsonl").read_bytes().startswith(before)


def test_resume_auto_renames_what_an_unsaved_run_has_written(runner):
    settings = {"run": {"batches": 2}, "checkpoint": {"at_end": False}}
    run = runner.folder / "run"
    runner.run(settings)
    kept = [(run / "metrics.jsonl").read_bytes(), (run / "samples/batch-000001.parquet").read_bytes()]
    for _ in range(2):
        runner.run(settings, resume="auto")
        first = [run / "metrics.jsonl.before-1", run / "samples.before-1/batch-000001.parquet"]
        assert [path.read_bytes() for path in first] == kept
    assert (run / "samples.before-2/batch-000002.parquet").exists() and len(runner.metrics()) == 2


@pytest.mark.parametrize("dry_run", [False, True])
def test_resume_auto_refuses_a_folder_that_does_not_hold_an_unsaved_run(runner, dry_run):
    def refused(match):
        before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
        with pytest.raises(ConfigError, match=match), ExitStack() as stack:
            preparation.prepare_run(runner.config(), Mode(resume="auto"), stack, dry_run=dry_run)
        assert all(path.read_bytes() == content for path, content in before.items())

    run = runner.folder / "run"
    run.mkdir()
    (run / "config.json").write_text('{"model_type": "llama"}')
    refused(r"run.dir: \S+ has a config.json that was not written by a run; choose another folder")
    shutil.rmtree(run)
    runner.run()
    (run / "checkpoints/batch-000008/state.json").unlink()
    refused(r"run.dir: \S+ has results \(checkpoints/batch-000008\) but no complete checkpoint")
    (run / "checkpoints/batch-000008").rename(run / "checkpoints/batch-000008.damaged")
    (run / "checkpoints/batch-000008.damaged/state.json").write_text("{}")
    refused(r"has results \(checkpoints/batch-000008.damaged\)")
    shutil.rmtree(run / "checkpoints")
    (run / "final").mkdir()
    refused(r"has results \(final\)")


@pytest.mark.parametrize("adapter", [None, AdapterSpec(rank=1, alpha=1.0, targets=())])
def test_the_first_checkpoint_needs_room_for_the_weights_unless_an_adapter_is_trained(runner, monkeypatch, adapter):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10**6))
    monkeypatch.setattr(TrainerConfig, "adapter", lambda self: adapter)
    config = runner.config()
    with open(runner.folder / "model/more.safetensors", "wb") as file:
        file.truncate(10**9)
    if adapter is None:
        with pytest.raises(CheckpointError, match=r"needs about 1.00 GB, but only 0.00 GB are free; nothing was saved"):
            runner.run()
    else:
        assert runner.run().checkpoint is not None
    folder = CheckpointFolder(runner.folder / "known", config.checkpoint)
    folder.commit(folder.begin(1), RunState(batch=1, version=1, producer={}, components={}, config={}))
    folder.check_space(10**9)  # the newest checkpoint shows how much space one needs


def test_disk_space_for_the_first_checkpoint_includes_the_optimizer(runner, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=11 * 10**6))
    monkeypatch.setattr(TrainerConfig, "saved_bytes_per_weight", lambda self, optimizer: 12 if optimizer else 4)
    runner.config()
    save_file({"w": np.zeros(10**6, np.float16)}, runner.folder / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"needs about 0.01 GB, but only 0.01 GB are free; nothing was saved"):
        runner.run()


@pytest.mark.parametrize(("critic", "needed"), [("auto", 24), ("critic", 48)])
def test_disk_space_for_the_first_checkpoint_includes_the_critic(runner, monkeypatch, critic, needed):
    monkeypatch.setattr(TrainerConfig, "saved_bytes_per_weight", lambda self, optimizer: 12 if optimizer else 4)
    config = runner.config()
    needs = replace(config.algorithm.needs(), critic=True)
    monkeypatch.setattr(type(config.algorithm), "needs", lambda self: needs)
    shutil.copytree(runner.folder / "model", runner.folder / "critic")
    weights = np.zeros(10**6, np.float16)
    save_file({"w": weights}, runner.folder / "model/model.safetensors")
    save_file({"w": np.tile(weights, 3), "lm_head.weight": weights}, runner.folder / "critic/model.safetensors")
    role = RoleConfig(path=critic if critic == "auto" else str(runner.folder / critic))
    saver = SimpleNamespace(trainer=FakeTrainer(), config=config.model_copy(update={"critic": role}))
    assert CheckpointSaver._least_bytes(saver) == needed * 10**6


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_anything_is_written(runner, monkeypatch):
    usage = shutil.disk_usage

    def short(path):
        found = usage(path)
        return found._replace(free=100) if (runner.folder / "run/checkpoints/batch-000004").exists() else found

    monkeypatch.setattr(shutil, "disk_usage", short)
    settings = {"checkpoint": {"every": 4, "keep_last": 10}}
    match = r"cannot save batch 8: it needs about 0.00 GB, but only 0.00 GB are free; .*batch-000004 is intact; free "
    with pytest.raises(CheckpointError, match=match):
        runner.run(settings)
    assert [path.name for path in (runner.folder / "run/checkpoints").iterdir()] == ["batch-000004"]
    monkeypatch.undo()
    assert runner.run(settings, resume=True).steps == 8
