"""Every shipped recipe resolves. Needs no GPU and no model: components import their backend only in `build`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from plasmid import load_config

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


def test_there_are_recipes():
    assert "smollm2-sums-cpu.toml" in [recipe.name for recipe in RECIPES]


def test_the_page_lists_every_recipe_once():
    """The table says of each recipe whether it was run, and with which result."""
    page = (ROOT / "recipes" / "README.md").read_text()
    listed = re.findall(r"(?m)^\| \[[^]]+\]\(([^)]+\.toml)\)", page)
    assert sorted(listed) == sorted(recipe.name for recipe in RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_resolves_and_its_dump_resolves_to_the_same(recipe):
    from plasmid.config.load import resolve

    config = load_config(recipe)
    assert config.recipe == recipe.stem
    dump = config.model_dump(mode="json")  # plugin files are loaded again, and then have other classes
    assert resolve(dump).model_dump(mode="json") == dump


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_data_of_a_recipe_are_there(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(recipe)
    for source in (config.data, *(e.data for e in config.eval)):
        paths = source.model_dump().get("path", ())
        for path in [paths] if isinstance(paths, str) else paths:
            assert Path(path.partition("@[")[0]).is_file()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_models_of_every_recipe_can_be_planned(recipe):
    from plasmid_runtime.lifecycle.model_plan import plan_models

    assert plan_models(load_config(recipe), recipes=[recipe])[0][0] == "model"


TASKS_TAKE_SECONDS = [
    pytest.param(path, marks=pytest.mark.long) if "reasoning" in path.name and "deepseek" not in path.name else path
    for path in RECIPES
]


@pytest.mark.parametrize("recipe", TASKS_TAKE_SECONDS, ids=lambda path: path.name)
def test_a_recipe_is_checked_without_its_model(recipe, monkeypatch, capsys):
    from plasmid_cli.main import app

    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        app(["train", str(recipe.relative_to(ROOT)), "--dry-run", "--offline"])
    printed, mistakes = capsys.readouterr()
    assert (stopped.value.code or 0, mistakes) == (0, "")
    table = printed[printed.index("\nplan") :]
    assert "recipes/models/" in table or "models/SmolLM2-135M-Instruct" in table
    assert "rollouts per batch" in table


OFFLINE = "recipes/glm-4.5-reasoning-128gpus.toml"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [OFFLINE, "trainer.expert_parallel=64", "placement.trainer_ranks=256"],
            "trainer.expert_parallel: the model has 160 experts, which cannot be split over 64 ranks",
        ),
        (
            [OFFLINE, "trainer.tensor_parallel=16"],
            "trainer: the model's num_key_value_heads = 8 cannot be split into 16 parts (tensor_parallel)",
        ),
        (
            [OFFLINE, "trainer.pipeline_parallel=8", "trainer.expert_parallel=16"],
            "trainer: the model's num_hidden_layers = 92 cannot be split into 8 parts "
            "(pipeline_parallel x virtual_pipeline); set transformer.num_layers_in_last_pipeline_stage for an "
            "uneven split",
        ),
        (
            [OFFLINE, "model.path=./models/GLM-4.5-Air"],
            "model.path: models/GLM-4.5-Air has no config.json, nor has recipes/models/GLM-4.5-Air; "
            "put the model's config.json there",
        ),
        (
            ["recipes/smollm2-sums-sglang-cpu.toml", "rollout.gpus_per_engine=2", "placement.engine_ranks=2"],
            "rollout.gpus_per_engine: the model's num_attention_heads = 9 cannot be split over 2 GPUs",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_without_the_model(changes, message, monkeypatch, capsys):
    from plasmid_cli.main import app

    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        app(["train", *changes, "--dry-run", "--offline"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines() == [f"error: {message}"]


def test_a_run_is_not_offline(monkeypatch, capsys):
    from plasmid_cli.main import app

    with pytest.raises(SystemExit):
        app(["train", OFFLINE, "--offline"])
    assert capsys.readouterr().err == "error: --offline: only checks a recipe; add --dry-run\n"


def test_resolving_a_recipe_imports_no_backend():
    code = (
        "import sys\n"
        "from plasmid import load_config\n"
        "[load_config(p) for p in sys.argv[1:]]\n"
        "print(sorted({'torch', 'ray', 'transformers', 'sglang', 'megatron'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *map(str, RECIPES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
