"""The number of batches that a run plans and trains if its data end before ``run.batches``."""

import json

import pytest
from plasmid_runtime.observe.journal import read_journal

MIXED = """
def row(seed, index):
    return {"prompt": f"say {index % 10}", "target": 1}
"""


class Started:
    """Observes without ``@hookimpl``."""

    def __init__(self):
        self.batches = 0

    def run_started(self, batches):
        self.batches = batches


def ended(runner, **data):
    """Run a recipe of 8 batches of 4 prompts."""
    runner.config()  # writes prompts.jsonl
    set_ = {"name": "few", "data": {"path": f"{runner.folder}/prompts.jsonl@[0:3]"}, "every": 2}
    return {"data": {"path": f"{runner.folder}/prompts.jsonl@[0:10]", "epochs": 1, **data}, "eval": [set_]}


@pytest.mark.parametrize("bound", [0, 1])
def test_a_run_plans_the_batches_that_its_epochs_are_enough_for(runner, caplog, bound):
    started = Started()
    result = runner.run({**ended(runner), "run": {"max_staleness": bound}}, observers=(started,))
    assert result.steps == started.batches == 3
    assert json.loads((runner.folder / "run" / "config.json").read_text())["run"]["batches"] == 3
    assert "the data has prompts for 3 batches, fewer than run.batches = 8; training 3 batches" in caplog.messages
    assert not any("the data ended" in message for message in caplog.messages)
    evaluated = [entry.step for entry in read_journal(runner.folder / "run" / "evaluations.jsonl")]
    assert evaluated == [0, 2, 3]


def test_a_run_ends_when_the_data_are_exhausted(runner):
    runner.run(ended(runner))
    again = runner.run(ended(runner), resume=True)
    assert again.was_finished and again.steps == 3


def test_data_that_last_longer_than_the_run_change_nothing(runner, caplog):
    assert runner.run(ended(runner, epochs=4)).steps == 8
    assert "fewer than run.batches" not in caplog.text


def test_data_that_filters_exhaust_sooner_are_reported_at_their_end(runner, caplog):
    result = runner.run({**ended(runner), "filters": [{"kind": "even-group"}]})
    assert result.steps < 3
    assert f"the data ended after {result.steps} of 3 planned batches" in caplog.text


def test_a_replay_plans_the_batches_that_were_stored(runner):
    runner.run({"run": {"batches": 2}})
    started = Started()
    runner.run({"run": {"dir": str(runner.folder / "again")}}, replay=runner.folder / "run", observers=(started,))
    assert started.batches == 2


@pytest.mark.parametrize(("exhausted", "weights"), [("go-on", {}), ("end", {}), ("end", {"made": 5.0})])
def test_a_mixture_counts_its_prompts(runner, exhausted, weights):
    (runner.folder / "rows.py").write_text(MIXED)
    sources = {
        "rows": {"path": f"{runner.folder}/prompts.jsonl@[0:7]", "epochs": 1},
        "made": {"kind": "function", "function": f"{runner.folder}/rows.py:row", "size": 9},
    }
    changes = ended(runner)
    config = runner.config({**changes, "data": {"kind": "mixture", "sources": sources, "exhausted": exhausted}})
    stream = config.data.model_copy(update={"weights": weights}).stream(lambda prompt, _: ([1], prompt), seed=3)
    known = stream.facts().num_draws
    drawn = 0
    while stream.draw() is not None:
        drawn += 1
    assert drawn == known and (drawn == 16 if exhausted == "go-on" else drawn < 16)
