"""The order in which ``load_config`` applies overrides."""

import pytest
from plasmid.config.load import load_config

RECIPE = """
model = { path = "m" }
trainer = { kind = "fsdp", lr = 1e-5 }
rollout = { kind = "hf" }
algorithm = { kind = "grpo" }
rewards = [{ kind = "number" }]
data = { path = "d.jsonl" }
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


@pytest.mark.parametrize("kind", ["trainer.kind=megatron", "trainer={kind='megatron'}"])
def test_a_kind_discards_the_recipes_table_but_no_other_override(recipe, kind):
    trainer = load_config(recipe, ["trainer.microbatch_tokens=4096", kind]).trainer
    assert (trainer.microbatch_tokens, trainer.lr) == (4096, type(trainer)().lr)
    first = load_config(recipe, [kind, "trainer.microbatch_tokens=4096"]).trainer
    assert first == trainer


def test_the_last_of_several_values_and_kinds_counts(recipe):
    overrides = ["trainer.kind=megatron", "run.seed=1", "trainer.lr=2e-6", "trainer.kind=fsdp", "run.seed=2"]
    config = load_config(recipe, overrides)
    assert (type(config.trainer).__name__, config.trainer.lr, config.run.seed) == ("FSDP", 2e-6, 2)
