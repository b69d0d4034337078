"""Whole runs on mixtures, curricula and profiles: settings of each prompt, feedback, and exact resume."""

import json
import os
import signal
from collections import Counter

import pytest
from plasmid.errors import ConfigError, DataError
from plasmid.plugins.hookspecs import hookimpl
from plasmid.types import SamplingParams
from plasmid_runtime.observe.sample_store import read_samples

ROWS = """
def row(*, seed, index):
    return {"prompt": f"make {seed % 1000} {index}", "target": index, "level": index % 4}
"""
PARTS = '''
from typing import Literal
from plasmid import Reward, Workflow, hookimpl

class FirstDigit(Reward):
    """First digit of the answer, over 9."""
    kind: Literal["first-digit"] = "first-digit"
    async def __call__(self, prompt, sample):
        return int(sample.text[0]) / 9

class Twice(Workflow):
    """Two completions one after the other."""
    kind: Literal["twice"] = "twice"
    async def run(self, rollout, prompt):
        first = await rollout.generate(prompt.token_ids)
        second = await rollout.generate(prompt.token_ids)
        return [rollout.sample(prompt, [first, second])]

@hookimpl
def register_components():
    return [FirstDigit, Twice]
'''


def recipe(runner, **changes):
    """Return a mixture of a curriculum over rows and of generated rows, each with its own rewards."""
    (runner.folder / "rows.py").write_text(ROWS)
    (runner.folder / "parts.py").write_text(PARTS)
    runner.config()  # writes prompts.jsonl
    easy = {"kind": "curriculum", "pass_threshold": 0.5, "source": {"path": f"{runner.folder}/prompts.jsonl@[0:12]"}}
    made = {"kind": "function", "function": f"{runner.folder}/rows.py:row"}
    return {
        "plugins": [*runner.config().plugins, str(runner.folder / "parts.py")],
        "data": {
            "kind": "mixture",
            "sources": {"easy": easy, "made": made},
            "weights": {"easy": 2.0},
            "profiles": {"made": "long"},
        },
        "rewards": [{"kind": "digits"}, {"kind": "first-digit", "name": "head", "weight": 2.0}],
        "profiles": {
            "long": {"rewards": ["head"], "workflow": {"kind": "twice"}, "sampling": {"temperature": 0.5}},
        },
        "checkpoint": {"every": 2, "keep_last": 10},
        **changes,
    }


def groups(runner, name="run"):
    files = sorted((runner.folder / name / "samples").glob("batch-*.parquet"))
    return [(file.name, group) for file in files for group in read_samples(file)]


def drawn(runner, run="run"):
    return [(name, g.id, g.prompt.id, [s.token_ids.tolist() for s in g.samples]) for name, g in groups(runner, run)]


def curve(runner, run="run"):
    chosen = ("reward/", "rollout/", "data/")
    return [{k: v for k, v in m.items() if k.startswith(chosen)} for m in runner.metrics(run)]


def test_sampling_and_rewards_follow_the_profile_of_the_prompt(runner):
    runner.run(recipe(runner))
    found = [group for _, group in groups(runner)]
    assert {group.prompt.source for group in found} == {"easy", "made"}
    for group in found:
        made = group.prompt.source == "made"
        assert group.prompt.profile == ("long" if made else "")
        for sample in group.samples:
            assert sample.num_generated == (8 if made else 4)
            assert sample.sampling.temperature == (0.5 if made else 1.0)
            head = int(sample.text[0]) / 9
            assert set(sample.score.components) == ({"head"} if made else {"digits", "head"})
            assert sample.reward == pytest.approx(sample.score.components.get("digits", 0.0) + 2 * head)


def test_a_profile_inherits_each_setting_of_sampling_that_it_does_not_set(runner):
    runner.run(recipe(runner, sampling={"max_new_tokens": 7, "stop": ["#"]}))
    for _, group in groups(runner):
        temperature = 0.5 if group.prompt.profile else 1.0
        for sample in group.samples:
            assert sample.sampling == SamplingParams(temperature=temperature, max_new_tokens=7, stop=("#",))


def test_a_set_comes_before_the_profile_of_its_prompts_key_by_key(runner):
    (runner.folder / "own.jsonl").write_text('{"prompt": "say 1", "target": 1, "as": "long"}\n')
    data = {"path": f"{runner.folder}/own.jsonl", "profile_key": "as"}
    set_ = {"name": "own", "data": data, "sampling": {"max_new_tokens": 3}}
    runner.run(recipe(runner, sampling={"stop": ["#"]}, eval=[set_]))
    [group] = read_samples(runner.folder / "run" / "samples" / "eval-own-000000.parquet")
    assert group.samples[0].sampling == SamplingParams(temperature=0.5, max_new_tokens=3, stop=("#",))


def test_metrics_contain_rewards_shares_and_components_of_each_source(runner):
    runner.run(recipe(runner))
    by_batch = {}
    for name, group in groups(runner):
        by_batch.setdefault(int(name[6:12]), []).append(group)
    for step, metrics in enumerate(runner.metrics(), start=1):
        for source in {group.prompt.source for group in by_batch[step]}:
            own = [g for g in by_batch[step] if g.prompt.source == source]
            rewards = [s.reward for g in own for s in g.samples]
            assert metrics[f"reward/source/{source}"] == pytest.approx(sum(rewards) / len(rewards))
            assert metrics[f"rollout/source/{source}"] == len(own) / 4
        digits = [s.score.components.get("digits") for g in by_batch[step] for s in g.samples]
        known = [value for value in digits if value is not None]
        assert ("reward/digits" in metrics) == bool(known)
        if known:
            assert metrics["reward/digits"] == pytest.approx(sum(known) / len(known))
    last = runner.metrics()[-1]
    counts = Counter(group.prompt.source for _, group in groups(runner))
    assert {name: last[f"data/{name}/drawn"] for name in counts} == counts
    assert last["data/easy/known"] == len({g.prompt.id for _, g in groups(runner) if g.prompt.source == "easy"})


def test_facts_of_the_data_stand_in_the_run_s_folder(runner):
    limits = {"path": f"{runner.folder}/prompts.jsonl", "max_prompt_tokens": 5, "too_long": "drop"}
    runner.run({"data": limits, "run": {"batches": 1}})
    told = json.loads((runner.folder / "run" / "run.json").read_text())["data"]
    assert (told["num_prompts"], told["left_out"]) == (10, 30)


@pytest.mark.parametrize("at", [pytest.param(2, marks=pytest.mark.long), 4, pytest.param(6, marks=pytest.mark.long)])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(runner, at):
    runner.run(recipe(runner))
    cut = runner.copy_cut_run(at)
    for step in range(at + 1, 9):
        (cut / f"samples/batch-{step:06d}.parquet").unlink()
    runner.run(recipe(runner, run={"dir": str(cut)}), resume=True)
    assert drawn(runner, cut.name) == drawn(runner)
    assert curve(runner, cut.name) == curve(runner)


class StopAt:
    """Simulates Ctrl-C when a phase of a batch begins."""

    def __init__(self, batch, phase):
        self.at = (batch, phase)

    @hookimpl
    def phase_started(self, batch, phase):
        if (batch, phase) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("bound", [0, 2])
def test_a_run_that_is_stopped_while_it_samples_loses_no_draw(runner, bound):
    settings = recipe(runner, run={"max_staleness": bound})
    for batch, phase in ((2, "sample"), (5, "train")):
        assert runner.run(settings, observers=(StopAt(batch, phase),), resume=batch > 2).interrupted
    runner.run(settings, resume=True)
    ids = [group.id for _, group in groups(runner)]
    assert len(ids) == len(set(ids)) == 32
    state = json.loads((sorted((runner.folder / "run" / "checkpoints").iterdir())[-1] / "state.json").read_text())
    stream = state["producer"]["stream"]
    assert sum(stream["drawn"].values()) == state["producer"]["next"]
    if bound == 0:
        known = {g.prompt.id.removeprefix("easy/") for _, g in groups(runner) if g.prompt.source == "easy"}
        assert set(stream["sources"]["easy"]["rates"]) == known


def test_a_profile_that_the_recipe_does_not_have_is_named_with_its_place(runner):
    data = runner.folder / "named.jsonl"
    data.write_text('{"prompt": "a", "target": 1, "kind": "exact"}\n{"prompt": "b", "target": 1, "kind": "exat"}\n')
    profiles = {"exact": {"rewards": ["digits"]}}
    with pytest.raises(DataError) as caught:
        runner.run({"data": {"path": str(data), "profile_key": "kind"}, "profiles": profiles})
    assert str(caught.value) == f"{data}:2: no such profile: 'exat'; profiles of the recipe are exact"
    assert not (runner.folder / "run").exists()
    sets = [{"name": "few", "data": {"path": str(data), "profile_key": "kind"}}]
    with pytest.raises(DataError) as caught:
        runner.run({"eval": sets, "profiles": profiles})
    assert str(caught.value) == "named.jsonl:2: no such profile: 'exat'; profiles of the recipe are exact"


def test_evaluation_sets_obey_profiles_and_mixtures(runner):
    settings = recipe(runner)
    sources = {
        "easy": {"path": f"{runner.folder}/prompts.jsonl@[0:2]"},
        "made": {"kind": "function", "function": f"{runner.folder}/rows.py:row", "size": 3},
    }
    data = {"kind": "mixture", "sources": sources, "profiles": {"made": "long"}}
    runner.run({**settings, "eval": [{"name": "mixed", "data": data}], "run": {"batches": 1}})
    found = read_samples(runner.folder / "run" / "samples" / "eval-mixed-000001.parquet")
    assert [group.prompt.id for group in found] == [
        "easy/prompts.jsonl:1",
        "easy/prompts.jsonl:2",
        "made/eval:0",
        "made/eval:1",
        "made/eval:2",
    ]
    assert [set(group.samples[0].score.components) for group in found] == [{"digits", "head"}] * 2 + [{"head"}] * 3
    assert [group.samples[0].num_generated for group in found] == [4, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"profiles": {"p": {"rewards": ["digit"]}}},
            "profiles.p.rewards: no reward is named 'digit'; rewards are digits",
        ),
        ({"profiles": {"p": {"rewards": []}}}, "profiles.p.rewards: must name at least one reward, got none"),
        ({"profiles": {"p": {"rewrds": ["digits"]}}}, "profiles.p.rewrds: no such setting; did you mean 'rewards'?"),
        ({"profiles": {"p": {"workflow": {"kind": "sngle-turn"}}}}, "profiles.p.workflow.kind: 'sngle-turn' is not"),
        ({"profiles": {"p": {"sampling": {"top_p": 2}}}}, "profiles.p.sampling.top_p: must be at most 1, got 2"),
        ({"profiles": [1]}, "profiles: must be a table of tables ([profiles.<name>]), got [1]"),
        ({"profiles": {"p": 3}}, "profiles.p: must be a table, got 3"),
        (
            {"rewards": [{"kind": "digits", "name": "x"}, {"kind": "digits", "name": "x"}]},
            "rewards: 2 are named 'x'; names must be unique, set name",
        ),
        ({"rewards": [{"kind": "digits", "name": "a b"}]}, "rewards.0.name: must match pattern"),
    ],
)
def test_profiles_that_cannot_be_meant_are_refused(runner, changes, message):
    with pytest.raises(ConfigError) as caught:
        runner.config(changes)
    assert str(caught.value).startswith(message)
