"""Whole runs with several turns: exact resume, agreement of engine and trainer, hooks, and a tiny model that learns."""

import io
import json
import os
import re
import shutil

import pytest
from plasmid.config.load import merge, resolve
from plasmid.types.runs import Mode
from plasmid_cli.reports.report import report_data
from plasmid_cli.reports.run_data import load_run
from plasmid_cli.reports.view import view_samples
from plasmid_models.testing import make_empty_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_samples
from rich.console import Console

pytestmark = pytest.mark.usefixtures("forked_environments")
HOOKS = """
from dataclasses import replace
from plasmid import hookimpl

@hookimpl
def sample_generated(sample):
    return replace(sample, metadata={**sample.metadata, "seen": True})

@hookimpl
def batch_ready(batch, groups):
    return [replace(group, rewards=group.rewards + 10) for group in groups]
"""


@pytest.fixture
def game(tmp_path, tiny_model):
    """Return a run that plays "guess a number" in plain text, one token per turn."""
    rows = [json.dumps({"prompt": "guess a number from 1 to 3\n", "row": row}) + "\n" for row in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    environment = {"kind": "guess", "highest": 3}
    plain = {
        "recipe": "guess",
        "model": {"path": str(tiny_model)},
        "run": {"dir": str(tmp_path / "run"), "batches": 2, "prompts_per_batch": 4, "samples_per_prompt": 4},
        "sampling": {"max_new_tokens": 1},
        "data": {"path": str(tmp_path / "prompts.jsonl"), "target_key": "none"},
        "workflow": {
            "kind": "environment",
            "max_turns": 2,
            "observation_format": " {observation}\n",
            "environment": environment,
        },
        "trainer": {"kind": "fsdp", "lr": 3e-3},
        "rollout": {"kind": "hf"},
        "algorithm": {"kind": "grpo"},
        "rewards": [{"kind": "environment"}],
        "checkpoint": {"every": 1, "keep_last": 10, "export": False},
    }

    def play(changes=None, **mode):
        return run(resolve(merge(plain, changes or {})), mode=Mode(**mode), make_cluster=lambda _: LocalCluster())

    play.folder = tmp_path
    return play


def metrics(folder):
    return [dict(entry.metrics) for entry in read_journal(folder / "metrics.jsonl")]


def stored(folder):
    files = sorted((folder / "samples").glob("batch-*.parquet"))
    return [sample for file in files for group in read_samples(file) for sample in group.samples]


def untimed(entries):
    return [{k: v for k, v in m.items() if k.startswith(("train/", "reward/", "rollout/", "version"))} for m in entries]


def test_a_run_of_several_turns_resumes_bit_by_bit(game):
    whole, folder = game.folder / "whole", game.folder / "run"
    loop = {"samples_per_prompt": 2}
    game({"run": loop | {"dir": str(whole)}})
    game({"run": loop})
    shutil.rmtree(folder / "checkpoints" / "batch-000002")
    game({"run": loop}, resume=True)
    assert untimed(metrics(folder)) == untimed(metrics(whole))
    assert [s.token_ids.tolist() for s in stored(folder)] == [s.token_ids.tolist() for s in stored(whole)]
    assert any(s.metadata["turns"] == 2 for s in stored(folder)), "or nothing was tested"
    assert max(m["train/logprob_diff_max"] for m in metrics(folder)) < 2e-5, "on tokens of every turn"


def test_rewards_of_turns_are_stored_and_change_what_is_trained(game):
    def play(name, **algorithm):
        costly = {"environment": {"kind": "guess", "highest": 3, "cost": 0.25}}
        game({"run": {"dir": str(game.folder / name), "batches": 1}, "algorithm": algorithm, "workflow": costly})
        return metrics(game.folder / name)[0]

    by_turn, by_sample = play("turn", baseline="turn"), play("sample")
    assert by_turn["reward/mean"] == by_sample["reward/mean"]
    assert by_turn["train/grad_norm"] != by_sample["train/grad_norm"]
    samples = stored(game.folder / "turn")
    assert {len(sample.score.token_rewards) for sample in samples} == {1, 2}
    for sample in samples:
        assert len(sample.score.token_rewards) == sample.metadata["turns"]
        assert sum(sample.score.token_rewards.values()) == sample.reward
        assert all(sample.loss_mask[position] for position in sample.score.token_rewards)


def test_rewards_of_turns_pass_through_a_sum_of_rewards_in_workers(game):
    parts = [{"kind": "isolated", "weight": 2.0, "workers": 1, "reward": {"kind": "environment"}}]
    game({"run": {"batches": 1}, "rewards": [{"kind": "sum", "rewards": parts}]})
    for sample in stored(game.folder / "run"):
        assert len(sample.score.token_rewards) == sample.metadata["turns"]
        expected = [2.0 * reward for reward in sample.metadata["environment"]["rewards"]]
        assert list(sample.score.token_rewards.values()) == expected


def test_rewards_of_turns_are_shown_by_rl_view_and_in_the_report(game):
    game({"run": {"batches": 1}, "workflow": {"environment": {"kind": "guess", "highest": 3, "cost": 0.25}}})
    loaded, console = load_run(game.folder / "run"), Console(file=io.StringIO(), width=200)
    view_samples(loaded, console, order="stored", count=100)
    expected = [list(sample.score.token_rewards.values()) for sample in stored(game.folder / "run")]
    assert {len(turns) for turns in expected} == {1, 2}
    shown = re.findall(r"by turn ([-\d., ]*\d)", console.file.getvalue())
    assert [[float(value) for value in turns.split(", ")] for turns in shown] == expected
    (file,) = report_data(loaded)["files"]
    assert [sample["turns"] for sample in sorted(file["samples"], key=numbers_of)] == expected


def numbers_of(shown):
    """Return group and index of a sample in the report."""
    return [int(number) for number in shown["id"].split("/")]


def test_hooks_of_a_plugin_file_change_samples_and_batches_of_a_run(game, tmp_path):
    hooks = tmp_path / "hooks.py"
    hooks.write_text(HOOKS)
    fakes = {
        "plugins": [str(hooks), _fakes()],
        "trainer": {"kind": "fake"},
        "rollout": {"kind": "fake", "num_tokens": 1},
    }
    model = {"model": {"path": str(make_empty_model(tmp_path / "hollow"))}, "algorithm": {"kind": "fake"}}
    game({**fakes, **model})
    assert all(sample.metadata["seen"] for sample in stored(game.folder / "run"))
    rewards = [sample.reward for sample in stored(game.folder / "run")]
    assert min(rewards) >= 0 and max(rewards) <= 1, "the store keeps what the rewards had said"
    assert all(10 <= m["reward/mean"] <= 11 for m in metrics(game.folder / "run"))


def test_all_actors_of_one_process_use_the_classes_of_one_import(game, tmp_path):
    """Otherwise, a rollout worker could not send them to its processes if the trainer imported the file after it."""
    imports, file = tmp_path / "imports", tmp_path / "counted.py"
    file.write_text(
        f"{HOOKS}\nimport os\nwith open({str(imports)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
    )
    game({"run": {"batches": 1}, "plugins": [str(file)]})
    assert imports.read_text().split().count(str(os.getpid())) == 2, "once for the recipe and once for the run"


def _fakes():
    from plasmid.testing import fakes

    return str(fakes.__file__)


@pytest.mark.long
def test_a_tiny_model_learns_to_listen_to_the_game(game):
    """Without hints, two guesses find one number of three in 2/3 of all games; with them always."""
    game({"run": {"batches": 100, "prompts_per_batch": 8, "samples_per_prompt": 8}, "checkpoint": {"every": 0}})
    rewards = [m["reward/mean"] for m in metrics(game.folder / "run")]
    assert sum(rewards[:5]) / 5 < 0.3
    assert sum(rewards[-10:]) / 10 > 0.8
