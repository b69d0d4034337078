"""Megatron accepts the configuration of every recipe that uses it, at the real size of its model."""

import asyncio
from pathlib import Path

import pytest
from plasmid import load_config

RECIPES = Path(__file__).parents[2] / "recipes"
BY_MEGATRON = [path for path in sorted(RECIPES.glob("*.toml")) if '"megatron"' in path.read_text()]
SIZES = {
    "deepseek-r1-reasoning-128gpus": (61, 7168, 128, 256),
    "glm-4-9b-reasoning-8gpus": (40, 4096, 32, None),
    "glm-4.5-reasoning-128gpus": (92, 5120, 96, 160),
    "llama-3.1-8b-reasoning-8gpus": (32, 4096, 32, None),
    "qwen3-235b-a22b-reasoning-64gpus": (94, 4096, 64, 128),
    "qwen3-30b-a3b-reasoning-8gpus": (48, 2048, 32, 128),
    "qwen3-4b-reasoning-8gpus": (36, 2560, 32, None),
    "smollm2-sums-megatron-2gpus": (30, 576, 9, None),
}
"""Number of layers, hidden size, attention heads and experts."""


def _megatron_config(recipe):
    """Run in a separate process, with the group sizes of the recipe but without other ranks."""
    from mbridge.core.parallel_states import ParallelStates
    from plasmid_megatron.weights.bridge import read_architecture
    from plasmid_models.source import Source

    config = load_config(recipe)
    settings = config.trainer
    states = ParallelStates(
        tp_size=settings.tensor_parallel,
        pp_size=settings.pipeline_parallel,
        vpp_size=settings.chunks_per_stage,
        cp_size=settings.context_parallel,
        ep_size=settings.expert_parallel,
        etp_size=settings.expert_tensor_size,
    )
    folder = recipe.parent / "models" / Path(config.model.path).name
    source = Source(where="model", path=folder, trust_remote_code=False)
    found = read_architecture(source, settings, states=states).config
    return found.num_layers, found.hidden_size, found.num_attention_heads, found.num_moe_experts


@pytest.mark.parametrize("recipe", BY_MEGATRON, ids=lambda path: path.stem)
def test_megatron_takes_the_configuration_of_a_recipe(recipe, rank_processes):
    assert asyncio.run(rank_processes.run(0, _megatron_config, recipe)) == SIZES[recipe.stem]
