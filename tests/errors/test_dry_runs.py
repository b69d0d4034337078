"""`rl train --dry-run` refuses what `rl train` refuses before it starts a process, with the same line."""

import json
import shutil
import sys

import pytest
from plasmid import load_config
from plasmid.testing import fakes
from plasmid.types.runs import Mode
from plasmid_cli.main import app
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

FILTER = "def keep(group, least):\n    return True\n"
OCCUPIED = "run.dir: run already has a run; continue it with --resume, choose another folder, or remove it"

KINDS = ("trainer.kind='fake'", "rollout.kind='fake'", "algorithm.kind='fake'")
FAKES = [*KINDS, f"plugins=['{fakes.__file__}']", "eval=[]", "checkpoint.export=false", "run.batches=1"]
"""A run without a model."""


@pytest.fixture
def both(rl):
    """Return a function that runs the command with and without ``--dry-run``; both must fail with the same lines."""

    def run(*argv: object) -> list[str]:
        dry = rl("train", "recipe.toml", *argv, "--dry-run")
        assert rl("train", "recipe.toml", *argv) == dry
        return dry

    return run


def finish(changes, **mode):
    """Run the recipe to its end, in this process."""
    run(load_config("recipe.toml", changes), mode=Mode(**mode), make_cluster=lambda _: LocalCluster())


def without(monkeypatch, *names):
    """Make packages look as if they were not installed."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_packages_that_components_need_are_looked_for(both, monkeypatch):
    without(monkeypatch, "math_verify", "wandb", "langdetect")
    inner = "{kind='sum',rewards=[{kind='ifeval'}]}"
    trackers = "trackers=[{kind='tensorboard'},{kind='wandb'}]"
    assert both(f"rewards=[{{kind='math'}},{inner}]", trackers) == [
        "rewards.0.kind: 'math' needs the package math_verify; pip install 'plasmid-rewards[math]'",
        "rewards.1.rewards.0.kind: 'ifeval' needs the package langdetect; pip install 'plasmid-rewards[ifeval]'",
        "trackers.1.kind: 'wandb' needs the package wandb; pip install 'plasmid[wandb]'",
    ]


def test_a_key_that_is_not_in_the_environment_is_looked_for(both):
    judge = "{kind='remote',url='http://localhost:1',server={api_key_env='NO_SUCH_KEY'}}"
    assert both(f"rewards=[{judge}]") == ["rewards.0.server.api_key_env: NO_SUCH_KEY is not set in the environment"]


LFM2 = {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
NESTED = {"model_type": "some_vl", "text_config": {"layer_types": ["mamba", "full_attention"]}}


@pytest.mark.parametrize(("family", "kind"), [(LFM2, "conv"), (NESTED, "mamba")], ids=["lfm2", "nested"])
def test_layers_of_another_kind_are_refused_for_engine_hf(both, folder, family, kind):
    file = folder / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | family))
    assert both() == [
        f"model.path: model has layers of kind {kind!r}, which engine 'hf' does not support; choose another "
        "model or engine"
    ]


def test_an_occupied_folder_is_refused(both, folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.json").write_text("{}")
    assert both() == [OCCUPIED]


@pytest.mark.parametrize(
    ("path", "why"), [("prompts.jsonl", "file exists"), ("prompts.jsonl/run", "not a directory"), ("/proc/run", "no ")]
)
def test_a_folder_that_cannot_be_written_is_refused(both, path, why):
    (line,) = both(f"run.dir='{path}'")
    assert line.startswith(f"run.dir: cannot write to {path}: {why}")


def test_a_dry_run_leaves_nothing_behind(folder, capsys):
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        app(["train", "recipe.toml", "--dry-run"])
    assert not stopped.value.code, capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_arguments_that_a_filter_does_not_take_are_refused(both, folder):
    (folder / "mine.py").write_text(FILTER)
    assert both("filters=[{kind='function',function='mine.py:keep',arguments={most=1}}]") == [
        "filters.0: arguments: mine.py:keep is called with (group) and ['most']: missing a required argument: 'least'"
    ]
    assert both("filters=[{kind='function',function='mine.py:keep',arguments={least=1,most=1}}]") == [
        "filters.0: arguments: mine.py:keep is called with (group) and ['least', 'most']: got an unexpected keyword "
        "argument 'most'"
    ]


def test_rewards_that_compare_with_targets_are_refused_without_any(both):
    assert both("data.target_key='none'", "rewards=[{kind='sum',rewards=[{kind='exact-match'}]}]") == [
        "rewards.0: kind 'exact-match' needs a target, but with data.target_key = \"none\" prompts have none; "
        "set it to the column of the targets, or use another reward"
    ]
    (line,) = both("eval.0.data.target_key='none'")
    assert line.startswith("rewards.0: kind 'number' needs a target, but with eval.0.data.target_key = ")


def test_a_source_without_targets_may_have_a_profile_of_other_rewards(both, folder, capsys):
    sources = "{a={path='prompts.jsonl'},b={path='prompts.jsonl',target_key='none'}}"
    data = f"data={{kind='mixture',sources={sources}}}"
    (line,) = both(data, "rewards=[{kind='number'}]")
    assert "data.sources.b.target_key" in line
    rewards = "rewards=[{kind='number'},{kind='random'}]"
    argv = ["train", "recipe.toml", data, rewards, "data.profiles.b='free'", "profiles.free.rewards=['random']"]
    with pytest.raises(SystemExit) as stopped:
        app([*argv, "--dry-run"])
    assert not stopped.value.code, capsys.readouterr().err


def test_more_tokens_than_the_model_takes_are_refused(both, folder):
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 300}))
    profile = "profiles.p.sampling.max_new_tokens=301"
    assert both("sampling.max_new_tokens=400", profile, "eval.0.sampling={temperature=0.0}") == [
        "sampling.max_new_tokens: must be at most 300, the model's limit including the prompt, got 400",
        "profiles.p.sampling.max_new_tokens: must be at most 300, the model's limit including the prompt, got 301",
    ]
    (line,) = both("workflow={kind='tools',tools=[{kind='calculator'}],max_tokens=999}")
    assert line == (
        'workflow.max_tokens: must be at most 300, the model\'s limit, got 999; lower it, or set it to "model"'
    )


def test_models_that_mean_other_tokens_are_refused(both, folder):
    shutil.copytree(folder / "model", folder / "other")
    for name, size in (("model", 90), ("other", 50)):
        (folder / name / "config.json").write_text(json.dumps({"vocab_size": size}))
    (line,) = both("reference.path='other'", "algorithm.kl_coef=0.1")
    assert line == ("reference.path: must have the policy's vocabulary of 90 tokens, but other has 50")


def test_a_chat_that_the_template_refuses_is_found_by_a_dry_run(both, folder):
    chat = {"prompt": [{"role": "user", "content": "x"}], "target": 1}
    (folder / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    (folder / "refusing.jinja").write_text("{{ raise_exception('no users here') }}")
    assert both("eval.0.data.path='chats.jsonl'", "model.chat_template='refusing.jinja'") == [
        "chats.jsonl:1: the chat template rejects the messages: no users here"
    ]


def test_resume_and_replay_are_checked_by_a_dry_run(both):
    assert both("--resume") == ["run.dir: run has no run to resume; start without --resume"]
    (line,) = both("--replay", "no")
    assert line.startswith("--replay: no has no samples")


def test_data_that_have_changed_are_found_before_a_resume(both, folder):
    finish(FAKES)
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "one more", "target": 1}) + "\n")
    assert both("--resume", *FAKES, "run.batches=2") == [
        "data.path: prompts.jsonl or its slice has changed since the checkpoint was saved; restore it, or "
        "start a new run"
    ]


def test_a_run_of_stored_samples_cannot_be_resumed(both, folder):
    finish(FAKES)
    again = [*FAKES, "run.dir='again'"]
    finish(again, replay=folder / "run")
    (line,) = both("--resume", *again, "run.batches=2")
    assert line == (
        "again/checkpoints/batch-000001: checkpoint of a run with --replay, which cannot be resumed; remove --resume"
    )


def test_a_dry_run_prints_the_number_of_batches_of_the_data(folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        app(["train", "recipe.toml", "data.epochs=1", "--dry-run"])
    assert not stopped.value.code
    out = capsys.readouterr().out
    assert "batches = 4\n" in out
    assert [line.split() for line in out.splitlines() if line.startswith("batches  ")] == [
        ["batches", "2", "the", "data", "ends", "before", "run.batches", "=", "4"]
    ]
