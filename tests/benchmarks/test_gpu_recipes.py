"""The commands at the top of the recipes for four GPUs pass the dry run, with the plan that the comment describes."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "benchmarks" / "gpu").glob("smollm2-*-4gpus.toml"))


def commands(recipe):
    """Return the arguments of the commands in a recipe's comment, without ``rl``."""
    comment = recipe.read_text().partition("\n\n[")[0]
    text = re.sub(r"\\\n#", "", comment)
    return [shlex.split(line)[1:] for line in re.findall(r"^#     (rl .*)$", text, re.MULTILINE)]


def test_there_are_two_recipes_with_two_commands_each():
    assert [len(commands(recipe)) for recipe in RECIPES] == [2, 2]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("number", "replicas", "engines"), [(0, 2, 4), (1, 1, 2)], ids=["synchronous", "staleness"])
def test_a_command_passes_the_dry_run_on_four_gpus(recipe, number, replicas, engines, monkeypatch, capsys):
    from plasmid_cli.main import app

    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        app([*commands(recipe)[number], "--dry-run", "--offline", "model.path=recipes/models/SmolLM2-135M-Instruct"])
    printed, mistakes = capsys.readouterr()
    assert (stopped.value.code or 0, mistakes) == (0, "")
    plan = {line[:28].strip(): line[28:].strip() for line in printed[printed.index("\nplan") :].splitlines()}
    assert re.match(rf"{replicas} +{2 * replicas} trainer ranks / 2 of each", plan["model replicas"])
    assert re.match(rf"{engines} +{engines} engine ranks / 1 of each", plan["servers"])
    assert plan["staleness"].split("  ")[0] == ("at most 0" if number == 0 else "at most 2")
