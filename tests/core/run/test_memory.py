"""The state of rewards, filters and workflows survives a resume, also with another number of worker processes."""

import json

import pytest
from plasmid.errors import CheckpointError
from plasmid_runtime.observe.sample_store import read_samples

from tests.core.run.test_resume import StopAt, curve

PLUGIN = '''
from typing import Literal
from plasmid import Filter, Reward, Tracker, hookimpl

class AboveMean(Reward):
    """How far the first digit is above the mean of all before it."""
    kind: Literal["above-mean"] = "above-mean"
    _seen: list = []
    def model_post_init(self, context):
        self._seen = [0.0, 0]
    def in_order(self):
        return True
    async def __call__(self, prompt, sample):
        total, count = self._seen
        digit = int(sample.text[0])
        self._seen[:] = [total + digit, count + 1]
        return digit - (total / count if count else 0.0)
    def state(self):
        return {"total": self._seen[0], "count": self._seen[1]}
    def restore(self, state):
        self._seen[:] = [state["total"], state["count"]]
    def merge(self, states):
        return {name: sum(state[name] for state in states) for name in ("total", "count")}

class EveryThird(Filter):
    """Drops every third group that it sees."""
    kind: Literal["every-third"] = "every-third"
    _seen: list = []
    def model_post_init(self, context):
        self._seen = [0]
    def __call__(self, group):
        self._seen[0] += 1
        return self._seen[0] % 3 != 0
    def state(self):
        return {"seen": self._seen[0]}
    def restore(self, state):
        self._seen[0] = state["seen"]

class Unsaved(Reward):
    """Has a state that is no JSON."""
    kind: Literal["unsaved"] = "unsaved"
    stateless: bool = False
    async def __call__(self, prompt, sample):
        return 0.0
    def state(self):
        return None if self.stateless else {"seen": {1, 2}}

class Logged(Tracker):
    """Has a state that is no JSON, or that it cannot restore."""
    kind: Literal["logged"] = "logged"
    mistake: str = ""
    async def open(self, context):
        pass
    def log(self, step, metrics):
        pass
    def state(self):
        return {"seen": {1, 2} if self.mistake == "state" else 1}
    def restore(self, state):
        if self.mistake == "restore":
            raise KeyError("seen")

@hookimpl
def register_components():
    return [AboveMean, Unsaved, EveryThird, Logged]
'''


@pytest.fixture
def remembering(make_runner):
    """Return a runner, and settings with a stateful reward and filter."""

    def make(name):
        runner = make_runner(name)
        plugin = runner.folder / "remembering.py"
        plugin.write_text(PLUGIN)
        plugins = [*runner.config().model_dump()["plugins"], str(plugin)]
        settings = {
            "plugins": plugins,
            "rewards": [{"kind": "above-mean"}],
            "filters": [{"kind": "every-third"}],
            "checkpoint": {"every": 2, "keep_last": 10},
            "rollout": {"max_delay_s": 0.05},
            "eval": [{"name": "few", "data": {"path": str(runner.folder / "prompts.jsonl") + "@[0:5]"}, "every": 2}],
        }
        return runner, settings

    return make


def rewards(runner, run="run"):
    files = sorted((runner.folder / run / "samples").glob("*.parquet"))
    return [(f.name, s.id, s.reward) for f in files for g in read_samples(f) for s in g.samples]


def states(runner, batch, run="run"):
    folder = runner.folder / run / f"checkpoints/batch-{batch:06d}/workers"
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_resumed_run_scores_and_filters_as_one_that_was_never_stopped(remembering, workers):
    runner, settings = remembering("runs")
    settings |= {"placement": {"rollout_workers": workers}}
    runner.run(settings)
    cut = runner.copy_cut_run(4)
    for step in range(5, 9):
        (cut / f"samples/batch-{step:06d}.parquet").unlink()
    runner.run({**settings, "run": {"dir": str(cut)}}, resume=True)
    assert curve(runner, cut.name) == curve(runner)
    assert rewards(runner, cut.name) == rewards(runner)
    assert states(runner, 8, cut.name) == states(runner, 8) and len(states(runner, 8)) == workers


def test_a_stopped_run_remembers_only_trained_groups(remembering):
    (whole, settings), (cut, others) = remembering("whole"), remembering("cut")
    whole.run(settings)
    assert cut.run(others, observers=(StopAt(3, "sample"),)).interrupted
    cut.run(others, resume=True)
    assert curve(cut) == curve(whole)
    assert rewards(cut) == rewards(whole)


def test_nothing_is_counted_twice_or_lost_with_another_number_of_processes(remembering):
    runner, settings = remembering("runs")
    totals = []
    for batches, workers in ((2, 2), (2, 3), (2, 1)):
        placement = {"placement": {"rollout_workers": workers}, "run": {"batches": batches * (len(totals) + 1)}}
        runner.run({**settings, **placement, "eval": []}, resume=bool(totals))
        totals.append(
            sum(state.get("rewards.0", {"count": 0})["count"] for state in states(runner, batches * (len(totals) + 1)))
        )
    scored = len(rewards(runner))
    assert totals == sorted(totals) and totals[-1] == scored


def test_a_state_that_is_no_json_is_named(remembering):
    runner, settings = remembering("runs")
    with pytest.raises(CheckpointError, match=r"^rewards.0: its state must have only JSON types: TypeError: Object of"):
        runner.run({**settings, "rewards": [{"kind": "unsaved"}]})


def test_a_state_that_is_no_mapping_is_named(remembering):
    runner, settings = remembering("runs")
    with pytest.raises(CheckpointError, match=r"^rewards.0: its state must be a mapping, got None"):
        runner.run({**settings, "rewards": [{"kind": "unsaved", "stateless": True}]})


def test_the_state_of_a_tracker_that_cannot_be_saved_or_restored_is_named(remembering):
    runner, settings = remembering("runs")
    with pytest.raises(CheckpointError, match=r"^trackers/logged: its state must have only JSON types: TypeError"):
        runner.run({**settings, "trackers": [{"kind": "logged", "mistake": "state"}]})
    assert runner.run({**settings, "run": {"dir": str(runner.folder / "second")}, "trackers": [{"kind": "logged"}]})
    changes = {"dir": str(runner.folder / "second"), "batches": 10}
    with pytest.raises(CheckpointError, match=r"^trackers/logged: cannot restore its state: KeyError: 'seen'"):
        runner.run({**settings, "run": changes, "trackers": [{"kind": "logged", "mistake": "restore"}]}, resume=True)


def test_an_asynchronous_run_takes_up_what_was_remembered(remembering):
    runner, settings = remembering("runs")
    asynchronous = {**settings, "run": {"max_staleness": 1, "batches": 4}, "eval": []}
    runner.run(asynchronous)
    before = states(runner, 4)[0]["rewards.0"]["count"]
    runner.run({**asynchronous, "run": {"max_staleness": 1, "batches": 8}}, resume=True)
    assert states(runner, 8)[0]["rewards.0"]["count"] > before > 0
