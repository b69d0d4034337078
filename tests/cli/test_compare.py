"""`rl compare`: the same recipe twice gives equal runs; for different runs it names where they diverge and why."""

import json
import os
from dataclasses import replace
from pathlib import Path

import plasmid.testing.fakes
import pytest
from plasmid.config.load import merge, resolve
from plasmid.errors import ConfigError
from plasmid.types import StopReason
from plasmid.types.runs import Mode
from plasmid_cli.comparison.runs import compare_runs
from plasmid_cli.main import app
from plasmid_cli.reports.run_data import load_run
from plasmid_models.manifest import write_manifest
from plasmid_models.testing import make_empty_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
from plasmid_runtime.observe.sample_store import read_dropped, read_samples, write_samples

FAKES = plasmid.testing.fakes.__file__
EVERY_THIRD = Path(__file__).parents[1] / "every_third.py"
FILTERS = {"filters": [{"kind": "every-third"}]}
PLUGIN = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Digits(Reward):
    """Mean digit of the answer."""
    kind: Literal["digits"] = "digits"
    power: float = 1.0
    async def __call__(self, prompt, sample):
        return (sum(int(c) for c in sample.text if c.isdigit()) / 9) ** self.power

@hookimpl
def register_components():
    return [Digits]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("compared")
    make_empty_model(path / "model")
    (path / "digits.py").write_text(PLUGIN)
    rows = [json.dumps({"prompt": f"say {i}", "target": str(i)}) + "\n" for i in range(40)]
    (path / "prompts.jsonl").write_text("".join(rows))
    (path / "others.jsonl").write_text("".join([*rows[:30], *reversed(rows[30:])]))
    start(path, "first")
    return path


def start(path: Path, name: str, changes=None):
    plain = {
        "model": {"path": str(path / "model")},
        "plugins": [str(path / "digits.py"), FAKES],
        "run": {"dir": str(path / name), "batches": 4, "prompts_per_batch": 4, "samples_per_prompt": 2},
        "data": {"path": str(path / "prompts.jsonl")},
        "trainer": {"kind": "fake"},
        "rollout": {"kind": "fake"},
        "algorithm": {"kind": "fake"},
        "rewards": [{"kind": "digits"}],
        "eval": [{"name": "few", "data": {"path": f"{path}/prompts.jsonl@[0:3]"}, "every": 2}],
        "checkpoint": {"export": False},
    }
    run(resolve(merge(plain, changes or {})), mode=Mode(), make_cluster=lambda _: LocalCluster())
    return path / name


def compared(path, name):
    return compare_runs(load_run(path / "first"), load_run(path / name))


def rl(capsys, *argv):
    with pytest.raises(SystemExit) as stopped:
        app(["compare", *map(str, argv)])
    return stopped.value.code, capsys.readouterr().out


def test_the_same_recipe_twice_gives_equal_metrics_and_samples(folder, capsys):
    second = start(folder, "second")
    found = compared(folder, "second")
    assert (found.num_equal, found.difference, found.settings, found.environment) == (4, "", [], [])
    text = "4 batches are equal, and the weights after batch 4; the runs do not differ\n"
    assert rl(capsys, folder / "first", second) == (0, text)


def test_runs_of_other_seeds_part_in_their_data_or_draws(folder, capsys):
    start(folder, "seed", {"run": {"seed": 7}, "data": {"shuffle": False}})
    code, out = rl(capsys, folder / "first", folder / "seed")
    assert (
        code == 1
        and "0 batches are equal\nfirst difference in batch 1: " in out
        and "caused by the data or its order" in out
    )
    assert "setting run.seed: 0 and 7\n" in out and "setting data.shuffle: True and False\n" in out


def test_the_seed_alone_changes_the_draws(folder):
    unshuffled = start(folder, "a", {"data": {"shuffle": False}})
    start(folder, "b", {"data": {"shuffle": False}, "run": {"seed": 7}})
    found = compare_runs(load_run(unshuffled), load_run(folder / "b"))
    assert found.difference.startswith("batch 1: group 0: sample 0/0 has ") and found.settings == ["run.seed: 0 and 7"]
    assert found.difference.endswith("after equal log-probabilities: caused by the seed")


def test_another_reward_is_named_with_both_values(folder):
    start(folder, "reward", {"rewards": [{"kind": "digits", "power": 2.0}]})
    found = compared(folder, "reward")
    assert found.difference.startswith("batch 1: group ") and found.difference.endswith(": caused by the reward")
    assert found.settings == ["rewards.0.power: 1.0 and 2.0"]


def change_metric(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[2]["metrics"]["train/loss"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_other_numerics_of_the_trainer_are_named_with_the_metric(folder):
    change_metric(start(folder, "numerics"))
    found = compared(folder, "numerics")
    assert found.num_equal == 2 and not found.settings and not found.environment
    assert found.difference.startswith("batch 3: the samples are equal, and train/loss is ")
    assert found.difference.endswith(": caused by the numerics of the trainer")


def test_numerics_are_not_the_cause_where_a_setting_differs(folder):
    change_metric(start(folder, "setting", {"run": {"train_timeout_s": 900.0}}))
    found = compared(folder, "setting")
    assert found.difference.startswith("batch 3: the samples are equal, and train/loss is ")
    assert found.difference.endswith(": caused by a difference listed below")
    assert found.settings == ["run.train_timeout_s: 1800.0 and 900.0"]


def test_numerics_are_not_the_cause_where_a_library_differs(folder):
    other = start(folder, "library")
    change_metric(other)
    info = json.loads((other / "run.json").read_text())
    info["libraries"]["torch"] = "2.0"
    (other / "run.json").write_text(json.dumps(info))
    found = compared(folder, "library")
    assert found.difference.endswith(": caused by a difference listed below")
    assert len(found.environment) == 1 and found.environment[0].startswith("libraries.torch: ")


def change_samples(run, batch, change):
    """Rewrite a sample file with other groups and filter decisions."""
    path = run / f"samples/batch-{batch:06d}.parquet"
    groups, dropped = read_samples(path), read_dropped(path)
    write_samples(path, change(groups), step=batch, dropped_by=dropped)


def with_first_sample(**changes):
    def change(groups):
        first, *others = groups[0].samples
        given = {name: value(first) for name, value in changes.items()}
        return [replace(groups[0], samples=(replace(first, **given), *others)), *groups[1:]]

    return change


def test_another_loss_mask_is_named_with_its_first_position(folder):
    def other_mask(sample):
        mask = sample.loss_mask.copy()
        mask[-1] = not mask[-1]
        return mask

    change_samples(start(folder, "mask"), 2, with_first_sample(loss_mask=other_mask))
    found = compared(folder, "mask")
    last = len(read_samples(folder / "first/samples/batch-000002.parquet")[0].samples[0].token_ids) - 1
    text = f"batch 2: group 4: sample 4/0 has a different loss mask from position {last} on: caused by the workflow"
    assert found.num_equal == 1 and found.difference == text


def test_another_stop_reason_is_named(folder):
    change_samples(start(folder, "stop"), 2, with_first_sample(stop_reason=lambda _: StopReason.LENGTH))
    found = compared(folder, "stop")
    assert found.num_equal == 1 and "sample 4/0 has the same tokens and the stop reasons " in found.difference


def test_another_decision_of_a_filter_is_named(folder):
    for name in ("filtered", "unlike"):
        start(folder, name, {"plugins": [str(folder / "digits.py"), FAKES, str(EVERY_THIRD)], **FILTERS})
    path = folder / "unlike/samples/batch-000001.parquet"
    groups, dropped = read_samples(path), read_dropped(path)
    assert dropped == {2: "every-third"}
    write_samples(path, groups, step=1, dropped_by={})
    found = compare_runs(load_run(folder / "filtered"), load_run(folder / "unlike"))
    text = "group 2, whose samples are equal, is dropped by every-third and kept: caused by the state of the filter"
    assert found.num_equal == 0 and found.difference == f"batch 1: {text}"


def test_a_group_that_only_one_run_has_dropped_is_named(folder):
    change_samples(start(folder, "less"), 3, lambda groups: groups[1:])
    found = compared(folder, "less")
    assert found.num_equal == 2 and found.difference.startswith("batch 3: group 8 is in only one of the runs: ")


def test_other_weights_are_named_with_the_file(folder):
    weights = start(folder, "weights") / "checkpoints/batch-000004/trainer/fake.json"
    weights.write_text(weights.read_text() + " ")
    write_manifest(weights.parent.parent)
    found = compared(folder, "weights")
    text = "samples and metrics are equal, and trainer/fake.json of the checkpoints differs: caused by the numerics of "
    assert (found.num_equal, found.difference, found.weights_after) == (3, f"batch 4: {text}the trainer", 0)


def test_exported_weights_are_compared_without_checkpoints(folder):
    for name in ("left", "right", "changed"):
        start(folder, name, {"checkpoint": {"export": True, "at_end": False}})
    left, right, changed = (load_run(folder / name) for name in ("left", "right", "changed"))
    assert not (folder / "left/checkpoints/batch-000004").exists()
    found = compare_runs(left, right)
    assert (found.difference, found.weights_after) == ("", 4)
    (folder / "changed/final/fake.json").write_text('{"step": 5}')
    found = compare_runs(left, changed)
    text = "the exported models after batch 4: final/fake.json differs: caused by the numerics of the export"
    assert (found.num_equal, found.difference, found.weights_after) == (4, text, 0)


def test_a_lost_line_of_metrics_is_named_and_is_no_difference_of_numerics(folder, caplog):
    other = start(folder, "lost-line")
    lines = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join([*lines[:1], *lines[2:]]))
    found = compared(folder, "lost-line")
    assert found.difference == "batch 2: only one of the runs has its line of metrics.jsonl"
    assert f"{other}/metrics.jsonl: batch 3 follows batch 1: lines are lost or repeated" in caplog.text


@pytest.mark.timeout(60)
def test_files_that_cannot_be_read_are_named(folder, caplog):
    other = start(folder, "pipes")
    for name in ("run.json", "checkpoints/batch-000004/manifest.json"):
        (other / name).unlink()
        os.mkfifo(other / name)
    (other / "config.json").write_text("[1]")
    found = compared(folder, "pipes")
    assert (found.num_equal, found.weights_after, found.difference) == (4, 0, "")
    for line in (
        "run.json: is not used, as it cannot be read: ",
        "config.json: is not used, as it was not written by a run",
        "manifest.json: cannot be read ",
    ):
        assert line in caplog.text


def test_a_folder_that_is_not_a_run_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        app(["compare", str(tmp_path), str(tmp_path)])
    assert stopped.value.code == 2 and "not a run" in capsys.readouterr().err


def test_a_run_without_a_batch_is_not_called_equal(folder, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no batch to compare"):
        compare_runs(load_run(folder / "first"), load_run(tmp_path))
