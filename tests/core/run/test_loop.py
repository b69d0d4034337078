"""Guarantees of the loop: staleness, waves, and well-defined ends."""

import time

import pytest
from plasmid.errors import DataError, DeadlineError, EngineError, PlasmidError, RewardError, SyncError
from plasmid.plugins.hookspecs import hookimpl
from plasmid_runtime.observe.sample_store import read_samples
from plasmid_runtime.planning.utilization import TrainUtilization


def staleness(runner) -> list[float]:
    return [m["rollout/staleness_max"] for m in runner.metrics()]


def stored(runner, step: int):
    return read_samples(runner.folder / "run" / "samples" / f"batch-{step:06d}.parquet")


QUICK = [(0, 1), (1, 2), (2, 1), (4, 2)]
OTHERS = [pytest.param(*pair, marks=pytest.mark.long) for pair in [(0, 2), (1, 1), (2, 2), (4, 1)]]


@pytest.mark.parametrize(("bound", "sync_every"), [*QUICK, *OTHERS])
def test_no_trained_group_is_staler_than_the_bound(runner, bound, sync_every):
    runner.run({"run": {"max_staleness": bound, "sync_every": sync_every}})
    assert len(staleness(runner)) == 8
    assert max(staleness(runner)) <= bound


def test_sampling_runs_ahead_of_training(runner):
    runner.run({"run": {"max_staleness": 2, "batches": 12}, "trainer": {"seconds": 0.05}})
    assert max(staleness(runner)) == 2


def test_the_bound_holds_with_over_sampling_because_it_is_enforced_at_take(runner):
    ahead = {"run": {"max_staleness": 1, "over_sampling": 4.0, "batches": 12}, "buffer": {"when_stale": "drop"}}
    runner.run({**ahead, "trainer": {"seconds": 0.05}})
    assert max(staleness(runner)) <= 1
    assert sum(m.get("rollout/dropped/stale", 0) for m in runner.metrics()) > 0


def test_every_batch_is_full_although_filters_drop_groups(runner):
    runner.run({"filters": [{"kind": "even-group"}]})
    for step in range(1, 9):
        groups = stored(runner, step)
        kept = [g for g in groups if int(g.samples[0].text[0]) % 2 == 0]
        assert len(kept) == 4
        assert all(len(g.samples) == 3 for g in groups)


def test_prompts_are_trained_once_each_in_the_order_of_the_data(runner):
    runner.run({"data": {"shuffle": False}, "run": {"batches": 5}})
    trained = [g.prompt.metadata.get("target", g.prompt.target) for step in range(1, 6) for g in stored(runner, step)]
    assert trained == list(range(20))


def test_data_that_ends_end_the_run_with_the_rest_trained(runner):
    runner.run({"data": {"epochs": 1}, "run": {"batches": 100, "prompts_per_batch": 12}})
    sizes = [len(stored(runner, step)) for step in range(1, len(runner.metrics()) + 1)]
    assert sizes == [12, 12, 12, 4]


def test_the_policy_is_published_and_evaluated_when_the_data_end_between_publishes(runner):
    data = {"path": str(runner.folder / "prompts.jsonl") + "@[0:3]"}
    changes = {
        "data": {"epochs": 1},
        "run": {"batches": 100, "prompts_per_batch": 8, "sync_every": 2},
        "eval": [{"name": "few", "data": data}],
    }
    result = runner.run(changes)
    assert [m["version"] for m in runner.metrics()] == [0, 1, 1, 2, 3]  # the fifth is known to be the last
    assert [step for step, _ in result.evaluations["few"]] == [0, 5]
    assert not result.interrupted


def test_filters_that_drop_everything_end_the_run_with_a_reason(runner):
    with pytest.raises(PlasmidError, match=r"filters: 12 consecutive groups were dropped \(nothing: 12\); loosen"):
        runner.run({"filters": [{"kind": "nothing"}], "run": {"max_dropped": 12}})


@pytest.mark.parametrize("bound", [0, 1])
def test_a_failing_rollout_becomes_a_sample_with_an_error(runner, bound):
    runner.run({"rollout": {"fail": ["2/1"]}, "run": {"max_staleness": bound}})
    samples = {s.id: s for step in range(1, 9) for g in stored(runner, step) for s in g.samples}
    assert samples["2/1"].error == "asked to fail"
    assert samples["2/1"].score.value == 0.0
    assert not samples["2/1"].loss_mask.any()


@pytest.mark.parametrize("bound", [0, 1])
def test_a_run_whose_rollouts_all_fail_ends_with_the_reason(runner, bound):
    changes = {"rollout": {"fail": [str(i) for i in range(10)]}, "run": {"max_staleness": bound}}
    with pytest.raises(EngineError, match=r"all samples of 4 consecutive prompt groups failed; .*: asked to fail"):
        runner.run(changes)


def test_a_run_whose_rollouts_mostly_fail_ends_with_the_reason(runner):
    fail = [f"{group}/{index}" for group in range(4) for index in (0, 2)]
    with pytest.raises(EngineError, match=r"8 of 12 failed, more than run.max_failed = 0.5; .*: asked to fail"):
        runner.run({"rollout": {"fail": fail}})


def test_a_rollout_that_hangs_is_ended_by_its_deadline(runner):
    runner.run({"rollout": {"hang": ["1/0"]}, "run": {"rollout_timeout_s": 1.0, "batches": 2}})
    errors = {s.id: s.error for g in stored(runner, 1) for s in g.samples}
    assert errors["1/0"].endswith("(run.rollout_timeout_s): no end within 1 s")


SLOW = '''
import asyncio, time
from typing import Literal
from plasmid import Reward, Workflow, hookimpl

class Slow(Reward):
    """Scores one sample after another."""
    kind: Literal["slow"] = "slow"
    def in_order(self):
        return True
    async def __call__(self, prompt, sample):
        await asyncio.sleep(0.1)
        return 1.0

class Deaf(Workflow):
    """Ignores its deadline, or blocks the worker."""
    kind: Literal["deaf"] = "deaf"
    blocks: bool = False
    async def run(self, rollout, prompt):
        if self.blocks:
            time.sleep(3)
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass

@hookimpl
def register_components():
    return [Slow, Deaf]
'''


def slow(runner, **changes):
    (runner.folder / "slow.py").write_text(SLOW)
    plugins = runner.config().model_dump(mode="json")["plugins"]
    return {"plugins": [*plugins, str(runner.folder / "slow.py")], **changes}


def test_rewards_may_wait_longer_for_each_other_than_a_rollout_may_take(runner, monkeypatch):
    monkeypatch.setattr("plasmid_runtime.rollout.worker_pool.GRACE_S", 0.5)
    one_by_one = {"rewards": [{"kind": "slow", "timeout_s": 1.0}], "checkpoint": {"at_end": False, "export": False}}
    run = {"batches": 1, "prompts_per_batch": 30, "samples_per_prompt": 1, "rollout_timeout_s": 1.0}
    assert runner.run(slow(runner, run=run, **one_by_one)).steps == 1


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (False, r"rollouts of group 0 \(run.rollout_timeout_s\): no end within 0.4 s"),
        (True, r"rollout-worker-0.is_sampling: no answer within 0.2 s"),
    ],
)
def test_a_workflow_that_does_not_end_or_blocks_its_worker_ends_the_run(runner, monkeypatch, blocks, message):
    monkeypatch.setattr("plasmid_runtime.rollout.worker_pool.GRACE_S", 0.2)
    run = {"prompts_per_batch": 1, "samples_per_prompt": 1, "rollout_timeout_s": 0.2}
    with pytest.raises(DeadlineError, match=message):
        runner.run(slow(runner, run=run, workflow={"kind": "deaf", "blocks": blocks}))


def test_a_slow_group_does_not_starve_the_others(runner):
    changes = {"rollout": {"hang": ["1/0"]}, "run": {"rollout_timeout_s": 100.0, "max_staleness": 4, "batches": 3}}
    runner.run(changes)
    first = [g.id for g in stored(runner, 1)]
    assert 1 not in first and len(first) == 4


HANGING = '''
import asyncio, time
from typing import Literal
from plasmid import Reward, Score, hookimpl

class Bad(Reward):
    """Misbehaves."""
    kind: Literal["bad"] = "bad"
    how: str = "raise"
    async def __call__(self, prompt, sample):
        if self.how == "raise":
            raise KeyError("answer")
        if self.how == "sleep":
            await asyncio.sleep(3600)
        if self.how == "block":
            time.sleep(5)
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "cancelled":
            raise asyncio.CancelledError
        if self.how == "awaited":
            task = asyncio.ensure_future(asyncio.sleep(3600))
            task.cancel()
            await task
        if self.how == "write":
            sample.token_ids[0] = 0
        if self.how == "pairs":
            return Score(value=1.0, token_rewards=((0, 1.0),))
        if self.how == "part":
            return Score(value=1.0, components={"length": "long"})
        return None

@hookimpl
def register_components():
    return [Bad]
'''


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rewards.0 \(bad\): raised on sample 0/0: KeyError: 'answer'"),
        ("sleep", r"rewards.0 \(bad\): no score for sample 0/\d within timeout_s = 0.2; make the reward faster"),
        ("block", r"rewards.0 \(bad\): no score for sample 0/\d within timeout_s = 0.2; make the reward faster"),
        ("none", r"rewards.0 \(bad\): must return a finite number or a Score, got None for sample 0/0"),
        ("exit", r"rewards.0 \(bad\): raised on sample 0/\d: RuntimeError: exited with SystemExit\(3\)"),
        (
            "cancelled",
            r"rewards.0 \(bad\): raised on sample 0/\d: RuntimeError: raised CancelledError, although the run",
        ),
        ("awaited", r"rewards.0 \(bad\): raised on sample 0/\d: RuntimeError: raised CancelledError, although the run"),
        ("write", r"rewards.0 \(bad\): raised on sample 0/\d: ValueError: assignment destination is read-only"),
        ("pairs", r"rewards.0 \(bad\): token_rewards must be a mapping, got \(\(0, 1.0\),\) \(tuple\) for sample 0/\d"),
        ("part", r"rewards.0 \(bad\): component 'length' must be a finite number, got 'long' \(str\) for sample 0/\d"),
    ],
)
def test_a_reward_that_misbehaves_ends_the_run_with_its_name(runner, how, message):
    (runner.folder / "bad.py").write_text(HANGING)
    plain = runner.config().model_dump(mode="json")
    changes = {
        "plugins": [*plain["plugins"], str(runner.folder / "bad.py")],
        "rewards": [{"kind": "bad", "how": how, "timeout_s": 0.2}],
        "run": {"prompts_per_batch": 1, "samples_per_prompt": 2},
    }
    with pytest.raises(RewardError, match=message):
        runner.run(changes)


@pytest.mark.parametrize("version", [0, 1, 3])
def test_weights_that_arrive_differently_end_the_run(runner, version):
    with pytest.raises(SyncError, match="checksum"):
        runner.run({"rollout": {"corrupt_version": version}})
    assert len(runner.metrics()) == max(0, version - 1)


class Recorder:
    def __init__(self):
        self.events = []

    @hookimpl
    def phase_started(self, batch, phase):
        self.events.append((batch, phase))

    @hookimpl
    def batch_finished(self, batch, metrics):
        self.events.append((batch, "finished"))


class Broken:
    @hookimpl
    def batch_finished(self, batch):
        raise RuntimeError("observer is broken")


def test_observers_are_notified_in_order_and_a_failing_one_affects_no_other(runner):
    recorder = Recorder()
    result = runner.run({"run": {"batches": 2}}, observers=(Broken(), recorder))
    assert result.steps == 2
    assert recorder.events == [
        (0, "start"),
        (0, "sync"),
        *((1, phase) for phase in ("sample", "score", "train", "sync", "finished")),
        *((2, phase) for phase in ("sample", "score", "train", "sync", "finished", "save")),
    ]
    more = Recorder()
    runner.run({"run": {"batches": 3}}, observers=(more,), resume=True)
    assert more.events[:3] == [(2, "start"), (2, "sync"), (3, "sample")]


def test_rollouts_only_starts_no_trainer(runner):
    result = runner.run({"run": {"batches": 3, "max_staleness": 1}}, rollouts_only=True)
    assert result.steps == 3
    assert "train/loss" not in runner.metrics()[0]
    assert result.checkpoint is None
    assert len(stored(runner, 3)) == 4


def test_metrics_of_the_engine_are_logged_with_each_batch(runner):
    runner.run({"run": {"batches": 2}})
    asked = [m["engine/requests"] for m in runner.metrics()]
    assert asked[0] >= 12 and asked[1] >= asked[0] + 12  # 4 prompts, 3 rollouts each


def test_replay_trains_on_stored_samples_without_an_engine(runner):
    runner.run({"run": {"batches": 3}, "filters": [{"kind": "even-group"}]})
    first = [m["train/loss"] for m in runner.metrics()]
    runner.run({"run": {"dir": str(runner.folder / "again")}}, replay=runner.folder / "run")
    assert [m["train/loss"] for m in runner.metrics("again")] == first
    assert not any("rollout/staleness_mean" in m for m in runner.metrics("again"))


CLUMSY = '''
from typing import Literal
from plasmid import Tracker, hookimpl

class Clumsy(Tracker):
    """Cannot be closed."""
    kind: Literal["clumsy"] = "clumsy"
    def log(self, step, metrics):
        pass
    async def close(self):
        raise RuntimeError("tracker is stuck")

@hookimpl
def register_components():
    return [Clumsy]
'''


def test_an_error_while_closing_does_not_hide_the_cause(runner):
    (runner.folder / "clumsy.py").write_text(CLUMSY)
    plugins = [*runner.config().plugins, str(runner.folder / "clumsy.py")]
    changes = {"plugins": plugins, "trackers": [{"kind": "clumsy"}]}
    assert runner.run({**changes, "run": {"batches": 1}}).steps == 1
    failing = {"run": {"dir": str(runner.folder / "other")}, "rollout": {"corrupt_version": 1}}
    with pytest.raises(SyncError, match="checksum"):
        runner.run({**changes, **failing})


OPENED = '''
from typing import Literal
from plasmid import Tracker, hookimpl

class Opened(Tracker):
    """Writes what it is opened with."""
    kind: Literal["opened"] = "opened"
    async def open(self, context):
        (context.run_dir / "opened.txt").write_text(f"{context.seed} {context.model_type}")
    def log(self, step, metrics):
        pass

@hookimpl
def register_components():
    return [Opened]
'''


def test_a_tracker_is_opened_with_the_seed_and_the_model_type(runner):
    (runner.folder / "opened.py").write_text(OPENED)
    (runner.folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    plugins = [*runner.config().plugins, str(runner.folder / "opened.py")]
    runner.run({"plugins": plugins, "trackers": [{"kind": "opened"}], "run": {"batches": 1, "seed": 5}})
    assert (runner.folder / "run" / "opened.txt").read_text() == "5 llama"


def test_data_that_end_before_anything_is_trained_on_say_so(runner):
    data = {"epochs": 1, "path": str(runner.folder / "prompts.jsonl") + "@[0:3]"}
    with pytest.raises(DataError, match="data: ended before the first batch: nothing; add prompts or loosen"):
        runner.run({"filters": [{"kind": "nothing"}], "data": data})


def test_batch_seconds_are_the_time_that_a_batch_took(runner):
    started = time.monotonic()
    runner.run({"run": {"batches": 5}, "trainer": {"seconds": 0.05}})
    seconds = [m["perf/batch_s"] for m in runner.metrics()]
    assert sum(seconds) < time.monotonic() - started
    for m in runner.metrics():
        parts = [m[f"perf/{name}_s"] for name in ("sample", "score", "train", "sync")]
        assert m["perf/batch_s"] > sum(parts) > 0.05


def test_the_utilization_of_the_trainers_gpus_is_a_metric(runner, monkeypatch):
    asked = []

    class Known:
        @staticmethod
        def metrics(groups, train_s):
            asked.append((sum(int(group.lengths.sum()) for group in groups), train_s))
            return {"perf/mfu": 0.5}

    monkeypatch.setattr(TrainUtilization, "of", lambda config: Known)
    runner.run({"run": {"batches": 2}})
    metrics = runner.metrics()
    assert [m["perf/mfu"] for m in metrics] == [0.5, 0.5]
    assert [train_s for _, train_s in asked] == [m["perf/train_s"] for m in metrics]
    assert all(
        tokens == pytest.approx(m["perf/tokens_per_s"] * m["perf/batch_s"])
        for (tokens, _), m in zip(asked, metrics, strict=True)
    )
