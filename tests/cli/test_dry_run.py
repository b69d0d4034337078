"""The configuration that `rl train --dry-run` prints."""

import tomllib

import pytest
from plasmid import load_config
from plasmid.components import DataFacts
from plasmid.config.load import resolve
from plasmid.config.placement import PlacementConfig
from plasmid_cli.display.dry_run import machine_rows, prompt_rows, to_toml
from plasmid_runtime.lifecycle import validation

RECIPE = """
model.path = "model"
trainer.kind = "fsdp"
rollout.kind = "hf"
algorithm.kind = "grpo"
rewards = [{ kind = "number" }]
data.path = "rows.jsonl"
sampling.temperature = 1.0
algorithm.kl_coef = 0.1
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return load_config(tmp_path / "recipe.toml", ["rollout.max_batch=64"])


def lines_of(text, table):
    """Return the lines of a table above and below the comment."""
    found = text.partition(f"\n[{table}]\n")[2].partition("\n\n")[0]
    above, comment, below = found.partition("# defaults:\n")
    assert comment
    return above.splitlines(), below.splitlines()


def test_settings_of_the_recipe_precede_defaults(config):
    text = to_toml(config)
    assert lines_of(text, "rollout")[0] == ['kind = "hf"', "max_batch = 64"], "also where it is set to its default"
    assert lines_of(text, "sampling")[0] == ["temperature = 1.0"]
    above, below = lines_of(text, "model")
    assert above == ['path = "model"'] and 'tokenizer = "auto"' in below
    assert lines_of(text, "placement")[0] == []
    assert text.index("\n[sampling]\n") < text.index("\n[placement]\n"), "tables without a setting come last"
    assert text.index("\n[trainer]\n") < text.index("\n[checkpoint]\n")


def test_inserted_kinds_count_as_defaults(config):
    text = to_toml(config)
    assert text.index("\nrecipe = ") < text.index("\n# defaults:\n") < text.index("\nfilters = []\n")
    assert lines_of(text, "data")[0] == ['path = "rows.jsonl"'], "the kind is a default, too"
    assert lines_of(text, "workflow")[0] == [] and 'kind = "single-turn"' in lines_of(text, "workflow")[1]


def test_prompts_are_listed_with_their_format_and_what_was_cut():
    facts = DataFacts(num_prompts=3, left_out=1, truncated=2, format="verl")
    assert prompt_rows(facts) == [("prompts", "3", "format of verl, 1 dropped as too long, 2 truncated")]


def test_the_printed_recipe_resolves_to_the_same_configuration(config):
    assert resolve(tomllib.loads(to_toml(config))).model_dump(mode="json") == config.model_dump(mode="json")


def test_ranks_of_other_models_are_listed(config):
    place = {"reference_ranks": 2, "trainer_ranks": 3}
    dedicated = config.model_copy(update={"placement": PlacementConfig(**place)})
    assert machine_rows(config) == [] and machine_rows(dedicated) == [("dedicated ranks of the reference", "2", "")]
    spread = config.model_copy(update={"placement": PlacementConfig(**place, nodes=2)})
    assert machine_rows(spread) == [
        ("ranks on machine 0", "3", "trainer 0-2"),
        ("ranks on machine 1", "3", "engine 0, reference 0-1"),
    ]


@pytest.mark.parametrize(
    ("flags", "device", "dtype", "warned"),
    [
        ("flags : sse2 avx2", "cpu", "bfloat16", True),
        ("flags : avx2 avx512bw avx512_bf16", "cpu", "bfloat16", False),
        ("Features : fp asimd", "cpu", "bfloat16", True),
        ("Features : fp asimd bf16", "cpu", "bfloat16", False),
        ("flags : sse2 avx2", "cuda", "bfloat16", False),
        ("flags : sse2 avx2", "cpu", "float32", False),
    ],
)
def test_a_cpu_without_instructions_for_bfloat16_is_reported(
    tmp_path, monkeypatch, caplog, flags, device, dtype, warned
):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    monkeypatch.setattr(validation, "CPU_FACTS", tmp_path / "cpuinfo")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    settings = [f"placement.device={device}", f"trainer.dtype={dtype}", f"rollout.dtype={dtype}"]
    validation.warn_of_slow_bfloat16(load_config(tmp_path / "recipe.toml", settings))
    assert ("set trainer.dtype=float32 rollout.dtype=float32" in caplog.text) == warned
