"""examples/bigram: its engine and its trainer satisfy their contracts, learn, and resume."""

import json
import shlex
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "bigram"
RECIPE = "examples/bigram/bigram.toml"
RUN = """
import sys
from plasmid import load_config
from plasmid.types.runs import Mode
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run
config = load_config(sys.argv[1:2], sys.argv[3:])
print(run(config, mode=Mode(resume=sys.argv[2] == "resume"), make_cluster=lambda _: LocalCluster()).steps)
"""


@pytest.fixture
def model(with_bigram, tmp_path):
    with_bigram(sys.executable, "-m", "plasmid_bigram.model", tmp_path / "model")
    return tmp_path / "model"


def test_its_own_tests_pass(with_bigram):
    out = with_bigram("pytest", "-q", "-p", "no:cacheprovider", "examples/bigram")
    assert "5 passed" in out


def rewards(folder):
    return [json.loads(line)["metrics"]["reward/mean"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_policy_learns_and_a_resumed_run_repeats_the_whole_one(with_bigram, model, tmp_path):
    def train(name, mode, *settings):
        folder = tmp_path / name
        train_options = [f"model.path={model}", f"run.dir={folder}", "checkpoint.export=false", *settings]
        with_bigram(sys.executable, "-c", RUN, RECIPE, mode, *train_options)
        return folder

    whole = train("whole", "new")
    parts = train("parts", "new", "run.batches=7")
    train("parts", "resume")
    found = rewards(whole)
    assert sum(found[:3]) / 3 < 0.5 and sum(found[-5:]) / 5 > 0.95
    assert rewards(parts) == found
    entries = [json.loads(line)["metrics"] for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert max(entry["train/logprob_diff_max"] for entry in entries) < 1e-5


@pytest.mark.long
def test_the_exported_policy_has_the_trained_weights(with_bigram, model, tmp_path):
    run_dir = tmp_path / "run"
    settings = [f"model.path={model}", f"run.dir={run_dir}", "run.batches=3"]
    with_bigram(sys.executable, "-c", RUN, RECIPE, "new", *settings)
    out = with_bigram(
        sys.executable,
        "-c",
        "import sys; from pathlib import Path; from plasmid_bigram.model import read_weight\n"
        "old, new = (read_weight('model', Path(path)) for path in sys.argv[1:])\n"
        "print(old.shape == new.shape, bool((old != new).any()))",
        model,
        run_dir / "final",
    )
    assert out.split() == ["True", "True"]


@pytest.mark.long
def test_the_commands_of_its_readme_work(with_bigram, tmp_path):
    block = (EXAMPLE / "README.md").read_text().split("```bash\n")[1].split("```")[0]
    commands = [shlex.split(line) for line in block.splitlines()]
    assert commands[0][:2] == ["pip", "install"] and commands[0][-1] == "examples/bigram"
    model = tmp_path / "bigram-model"
    for command in commands[1:]:  # the fixture has run the first
        if command[0] == "rl":
            with_bigram(*command, f"model.path={model}", f"run.dir={tmp_path / 'run'}")
        else:
            with_bigram(sys.executable, *(str(model) if part == "bigram-model" else part for part in command[1:]))
    assert rewards(tmp_path / "run")[-1] > 0.95
