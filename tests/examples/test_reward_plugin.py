"""examples/reward-plugin: a complete package that installs, is listed, and rewards samples in a run."""

import json
import shlex
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward-plugin"
RECIPES = ("recipes/smollm2-sums-cpu.toml", "examples/reward-plugin/contains.toml")
SMALL = ("run.batches=2", "run.prompts_per_batch=2", "run.samples_per_prompt=4", "eval=[]", "trackers=[]")
# one precision, because the threads of a local cluster share torch's default dtype
LESS = (
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "checkpoint.export=false",
    "sampling.stop=[]",
    "trainer.dtype=float32",
    "rollout.dtype=float32",
)
RUN = """
import sys
from plasmid import load_config
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
print(run(load_config(sys.argv[1:3], sys.argv[3:]), make_cluster=lambda _: LocalCluster()).steps)
"""


def test_the_installed_package_is_listed_with_its_version(with_example):
    line = next(line for line in with_example("rl", "plugins").splitlines() if " contains " in line)
    assert "plasmid-reward-contains 0.1.0" in line
    assert "1.0 if the sample contains a text, else 0.0." in line


def test_rl_options_shows_help_of_the_example_reward(with_example):
    text = with_example("rl", "options", "contains")
    assert "needle" in text and "Text to search for." in text
    assert "ignore_case" in text and "Ignore case." in text


def test_the_example_reward_is_unknown_unless_installed():
    from plasmid.plugins.registry import find_components, load_plugins

    assert "contains" not in find_components(load_plugins())["rewards"]


def test_a_recipe_with_it_is_resolved_and_a_misspelt_setting_is_not(with_example):
    code = """
import sys
from plasmid import load_config
from plasmid.errors import ConfigError
config = load_config(sys.argv[1:3])
print([reward.kind for reward in config.rewards], config.rewards[1].needle, config.rewards[1].weight)
try:
    load_config(sys.argv[1:3], ["rewards.1.neddle='x'"])
except ConfigError as error:
    print(error)
"""
    assert with_example(sys.executable, "-c", code, *RECIPES).splitlines() == [
        "['number', 'contains'] 1 0.1",
        "rewards.1.neddle: no such setting; did you mean 'needle'?",
    ]


def check_rewards_of(run_dir: Path) -> None:
    """Check that the stored samples contain the example's reward, and that its weight is applied."""
    metrics = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    assert all("reward/contains" in m and "reward/number" in m for m in metrics)
    for m in metrics:
        assert m["reward/mean"] == pytest.approx(m["reward/number"] + 0.1 * m["reward/contains"], abs=1e-6)
    tables = [pyarrow.parquet.read_table(path) for path in sorted((run_dir / "samples").glob("batch-*.parquet"))]
    assert sum(table.num_rows for table in tables) == 16


@pytest.fixture
def small_run(tiny_model, tmp_path) -> tuple[str, ...]:
    """Return recipes and settings for two batches with a tiny model."""
    return (*RECIPES, f"model.path={tiny_model}", f"run.dir={tmp_path / 'run'}", *SMALL, *LESS)


@pytest.mark.long
def test_a_training_run_uses_the_example(with_example, small_run, tmp_path):
    assert with_example(sys.executable, "-c", RUN, *small_run).splitlines()[-1] == "2"
    check_rewards_of(tmp_path / "run")


@pytest.mark.long
def test_rl_train_uses_the_example_reward_in_separate_processes(with_example, small_run, tmp_path):
    with_example("rl", "train", *small_run)
    check_rewards_of(tmp_path / "run")


def test_the_commands_of_its_readme_work(with_example, tiny_model):
    block = (EXAMPLE / "README.md").read_text().split("```bash\n")[1].split("```")[0]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert commands[0][:2] == ["pip", "install"] and commands[0][-1] == "examples/reward-plugin"
    for command in commands[1:]:  # the fixture has run the first
        model = [f"model.path={tiny_model}"] if command[:2] == ["rl", "train"] else []
        start = [sys.executable] if command[0] == "python" else [command[0]]
        assert with_example(*start, *command[1:], *model)
