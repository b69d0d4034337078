"""Resume: a continued run equals one that was never stopped."""

import asyncio
import json
import shutil
import sys

import pytest
from plasmid.components import PromptStream
from plasmid.config.checkpoint import CheckpointConfig
from plasmid.errors import CheckpointError
from plasmid.plugins.hookspecs import hookimpl
from plasmid.testing.rewards import make_prompt
from plasmid_runtime.checkpoint.folder import CheckpointFolder, RunState
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_runtime.rollout.producers.buffer import OldestFirst
from plasmid_runtime.rollout.producers.draws import Draws
from plasmid_runtime.rollout.producers.producer import DropLimit
from plasmid_runtime.rollout.producers.stream import StreamProducer

SETTINGS = {"filters": [{"kind": "even-group"}], "checkpoint": {"every": 2, "keep_last": 10}}
TIMES = ("perf/", "memory/", "gpu/", "engine/", "sync/transfer_s")


def curve(runner):
    return [{k: v for k, v in m.items() if not k.startswith(TIMES)} for m in runner.metrics()]


def tokens(runner, step):
    groups = read_samples(runner.folder / "run" / "samples" / f"batch-{step:06d}.parquet")
    return [(g.id, g.prompt.id, s.id, s.token_ids.tolist()) for g in groups for s in g.samples]


@pytest.mark.parametrize("at", [2, 4, pytest.param(6, marks=pytest.mark.long)])
def test_a_resumed_run_equals_one_that_was_never_stopped(make_runner, at):
    whole, cut = make_runner("whole"), make_runner("cut")
    whole.run(SETTINGS)
    cut.run(SETTINGS)
    for path in (cut.folder / "run" / "checkpoints").iterdir():
        if int(path.name.removeprefix("batch-")) > at:
            shutil.rmtree(path)  # as if it had been killed just before the next save
    result = cut.run(SETTINGS, resume=True)
    assert result.steps == 8
    assert curve(cut) == curve(whole)
    for step in range(1, 9):
        assert tokens(cut, step) == tokens(whole, step)


class StopAt:
    """Presses Ctrl-C, so to speak, when a phase of a batch begins."""

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
def test_ctrl_c_saves_and_the_run_continues_exactly(make_runner, phase):
    whole, cut = make_runner("whole"), make_runner("cut")
    slow = {**SETTINGS, "trainer": {"seconds": 0.02}, "rollout": {"max_delay_s": 0.05}}
    whole.run(slow)
    result = cut.run(slow, observers=(StopAt(3, phase),))
    assert result.interrupted
    assert result.steps < 8
    assert result.checkpoint is not None
    assert not cut.run(slow, resume=True).interrupted
    assert curve(cut) == curve(whole)


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
            r"run.seed: was 0 when the checkpoint was written, is 7 now; change it back",
        ),
        ({"run": {"batches": 9}, "rewards": [{"kind": "digits", "weight": 2.0}]}, r"rewards.0.weight: was 1.0"),
    ],
)
def test_resume_refuses_what_would_be_another_run(runner, change, message):
    runner.run({"run": {"batches": 8}})
    with pytest.raises(CheckpointError, match=message):
        runner.run(change, resume=True)


def test_resume_without_a_run_says_so(runner):
    with pytest.raises(CheckpointError, match=r"holds no run to resume; start without --resume"):
        runner.run(resume=True)


def test_a_run_folder_is_not_overwritten(runner):
    runner.run({"run": {"batches": 1}})
    with pytest.raises(Exception, match=r"holds a run already; continue it with --resume"):
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
        stream = StreamProducer(Draws(Numbers()), never, slots=4, max_staleness=1, limit=limit, policy=OldestFirst())
        stream.release(0, version=0)
        await asyncio.sleep(0)
        state = stream.state()
        await stream.close()
        return state

    state = asyncio.run(save())
    assert [item["id"] for item in state["pending"]] == [0, 1, 2, 3]
    again = Draws(Numbers())
    again.restore(state)
    drawn = [again.draw() for _ in range(5)]
    assert [(draw.id, draw.prompt.id) for draw in drawn] == [(i, str(i + 1)) for i in range(5)]


def test_an_evaluation_before_the_first_batch_is_not_repeated_on_a_resume(runner):
    slow = {
        "rollout": {"max_delay_s": 0.2},
        "eval": [{"name": "few", "data": {"path": str(runner.folder / "prompts.jsonl") + "@[0:3]"}, "every": 4}],
    }
    stopped = runner.run(slow, observers=(StopAt(0, "evaluate"),))
    assert stopped.interrupted and stopped.steps == 0
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
        seen.append(first in folder.all())

    sys.addaudithook(lambda event, args: watch() if event == "shutil.rmtree" and str(args[0]) == str(first) else None)
    folder.commit(folder.begin(2), RunState(batch=2, **state))
    assert seen == [False]
    assert not first.exists()


def test_a_save_of_the_same_batch_leaves_the_complete_checkpoint_alone(runner):
    runner.run({"run": {"batches": 4}})
    file = runner.folder / "run/checkpoints/batch-000004/state.json"
    before = file.stat()
    slow = {"run": {"batches": 8}, "rollout": {"max_delay_s": 0.3}}
    plain = runner.config().model_dump(mode="json")
    assert runner.run({**slow, "rollout": plain["rollout"]}, observers=(StopAt(4, "sync"),), resume=True).interrupted
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert file.stat().st_ino == before.st_ino
