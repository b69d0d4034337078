"""Every shipped recipe resolves. Needs no GPU and no model: components import their backend only in `build`."""

import subprocess
import sys
from pathlib import Path

import pytest
from plasmid import load_config

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


def test_there_are_recipes():
    assert "smollm2-sums-cpu.toml" in [recipe.name for recipe in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_resolves_and_its_dump_resolves_to_the_same(recipe):
    from plasmid.recipe import resolve

    config = load_config(recipe)
    assert config.recipe == recipe.stem
    dump = config.model_dump(mode="json")  # plugin files are loaded anew, and their classes are then others
    assert resolve(dump).model_dump(mode="json") == dump


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_the_data_of_a_recipe_are_there(recipe, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(recipe)
    for source in (config.data, *(e.data for e in config.eval)):
        paths = source.model_dump().get("path", ())
        for path in [paths] if isinstance(paths, str) else paths:
            assert Path(path.partition("@[")[0]).is_file()


def test_resolving_a_recipe_imports_no_backend():
    code = (
        "import sys\n"
        "from plasmid import load_config\n"
        "[load_config(p) for p in sys.argv[1:]]\n"
        "print(sorted({'torch', 'ray', 'transformers', 'sglang', 'megatron'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, *map(str, RECIPES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
