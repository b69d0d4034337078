"""Exported policies: of finished runs, of runs that were killed before the export, and of checkpoints."""

import json

import pytest
from plasmid.errors import CheckpointError, ModelError
from plasmid_models import source
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.export import drop_unused_components, export_checkpoint

SHORT = {"run": {"batches": 2}, "checkpoint": {"every": 1, "export": True}}


def cluster(folder):
    return LocalCluster()


def origin(folder):
    return json.loads((folder / "plasmid.json").read_text())


def test_resuming_a_finished_run_trains_nothing(runner):
    first = runner.run(SHORT)
    journal = (runner.folder / "run/metrics.jsonl").read_bytes()
    again = runner.run(SHORT, resume=True)
    assert again.was_finished and not again.interrupted and not first.was_finished
    assert (again.steps, again.final, again.checkpoint) == (2, first.final, first.checkpoint)
    assert (runner.folder / "run/metrics.jsonl").read_bytes() == journal


def test_a_run_killed_before_the_export_exports_on_resume(runner):
    runner.run(SHORT | {"checkpoint": {"every": 1, "export": False}})
    assert not (runner.folder / "run/final").exists()
    assert runner.run(SHORT, resume=True).final == runner.folder / "run/final"
    assert origin(runner.folder / "run/final") == {"recipe": "run", "batch": 2}


def test_an_export_of_an_earlier_batch_is_not_taken_for_the_final_policy(runner):
    runner.run(SHORT)
    longer = {"run": {"batches": 3}, "checkpoint": {"every": 1, "export": False}}
    runner.run(longer, resume=True)
    assert origin(runner.folder / "run/final")["batch"] == 2
    runner.run(longer | {"checkpoint": {"every": 1, "export": True}}, resume=True)
    assert origin(runner.folder / "run/final")["batch"] == 3


def test_policies_are_exported_at_an_interval(runner, tmp_path):
    runner.run({"run": {"batches": 5}, "checkpoint": {"every": 2, "export_every": 2, "export": False}})
    exports = runner.folder / "run/exports"
    assert sorted(path.name for path in exports.iterdir()) == ["batch-000002", "batch-000004"]
    export_checkpoint(
        runner.folder / "run/checkpoints/batch-000004", tmp_path / "out", make_cluster=cluster, trust_recipe=True
    )
    for file in (tmp_path / "out").iterdir():
        assert (exports / "batch-000004" / file.name).read_bytes() == file.read_bytes(), file.name
    assert origin(exports / "batch-000002") == {"recipe": "run", "batch": 2}


def test_any_checkpoint_can_be_exported(runner, tmp_path):
    runner.run(SHORT)
    run = runner.folder / "run"
    first = run / "checkpoints/batch-000001"
    assert export_checkpoint(first, tmp_path / "first", make_cluster=cluster, trust_recipe=True) == 1
    assert export_checkpoint(run, tmp_path / "newest", make_cluster=cluster, trust_recipe=True) == 2
    copied = first.rename(tmp_path / "copied")
    assert export_checkpoint(copied, tmp_path / "again", make_cluster=cluster, trust_recipe=True) == 1
    assert [origin(tmp_path / name)["batch"] for name in ("first", "newest", "again")] == [1, 2, 1]


def test_exports_that_cannot_be_made_say_why(runner, tmp_path):
    with pytest.raises(CheckpointError, match=r": neither a checkpoint \(it has no state.json\) nor the folder of a"):
        export_checkpoint(tmp_path, tmp_path / "out", make_cluster=cluster, trust_recipe=True)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out", make_cluster=cluster, trust_recipe=True)
    runner.run(SHORT)
    with pytest.raises(CheckpointError, match="already exists; remove it or choose another folder"):
        export_checkpoint(runner.folder / "run", runner.folder / "run/final", make_cluster=cluster, trust_recipe=True)


@pytest.mark.parametrize("part", ["adapter", "critic"])
def test_an_export_leaves_folders_beside_it_alone(runner, tmp_path, part):
    runner.run(SHORT | {"checkpoint": {"every": 1, "export": False}})
    beside = tmp_path / f"out-{part}"
    beside.mkdir()
    (beside / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError) as error:
        export_checkpoint(runner.folder / "run", tmp_path / "out", make_cluster=cluster, trust_recipe=True)
    assert str(error.value) == f"{beside}: already exists; remove it or choose another folder"
    assert (beside / "notes.txt").read_text() == "mine" and not (tmp_path / "out").exists()
    (beside / "notes.txt").unlink()
    assert export_checkpoint(runner.folder / "run", tmp_path / "out", make_cluster=cluster, trust_recipe=True) == 2


def test_an_export_takes_a_model_of_the_hub(runner, tmp_path, monkeypatch):
    runner.run(SHORT)
    asked = []

    def refuse(key, name, *, weights=True):
        asked.append((key, name, weights))
        raise ModelError("asked")

    monkeypatch.setattr(source, "download_model", refuse)
    with pytest.raises(ModelError, match="asked"):
        export_checkpoint(
            runner.folder / "run",
            tmp_path / "out",
            make_cluster=cluster,
            trust_recipe=True,
            overrides=["model.path=org/name"],
        )
    assert asked == [("model.path", "org/name", True)]


PLUGIN = '''
from typing import Literal
from plasmid import Reward, hookimpl

class Own(Reward):
    """Always 1."""
    kind: Literal["own"] = "own"
    async def __call__(self, prompt, sample):
        return 1.0

@hookimpl
def register_components():
    return [Own]
'''


def test_an_export_needs_neither_the_rewards_nor_the_plugins_of_the_run(runner, tmp_path):
    plugin = runner.folder / "own.py"
    plugin.write_text(PLUGIN)
    plain = runner.config().model_dump(mode="json")
    rewards = [{"kind": "own"}, {"kind": "own", "name": "second", "weight": 0.5}]
    own = {"name": "held-out", "data": plain["data"], "rewards": [{"kind": "own"}]}
    profiles = {"short": {"rewards": ["second"]}}
    changes = {"plugins": [*plain["plugins"], str(plugin)], "rewards": rewards, "profiles": profiles, "eval": [own]}
    runner.run(SHORT | changes)
    checkpoint = runner.folder / "run/checkpoints/batch-000002"
    state = json.loads((checkpoint / "state.json").read_text())
    assert [reward["kind"] for reward in state["config"]["rewards"]] == ["own", "own"]
    plugins = f"plugins={json.dumps(plain['plugins'])}"
    assert export_checkpoint(checkpoint, tmp_path / "out", make_cluster=cluster, overrides=[plugins]) == 2
    for file in (runner.folder / "run/final").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_stand_ins_keep_the_names_of_rewards():
    rewards = [{"kind": "own"}, {"kind": "own"}, {"kind": "own", "name": "second"}]
    kept = drop_unused_components({"rewards": rewards, "filters": [{"kind": "own"}], "run": {"batches": 2}})
    names = [("number", "own-0"), ("number", "own-1"), ("number", "second")]
    assert kept == {"rewards": [{"kind": kind, "name": name} for kind, name in names], "run": {"batches": 2}}
    assert drop_unused_components({"rewards": "none", "eval": [1]}) == {"rewards": "none", "eval": [1]}
