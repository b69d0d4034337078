"""Shared prefixes change no scores, losses or weights, and need fewer tokens."""

import asyncio

import pytest
from megatron_cases import ADAM, assert_alike, make_batch, make_config, outcome
from megatron_families import make_family
from megatron_patches import capture_graphs, compile_graphs, count_tokens
from plasmid.errors import ConfigError

LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "recomputed": (1, {"transformer": {"recompute_granularity": "selective"}}),
    "small microbatches": (1, {"microbatch_tokens": 30}),
}


LONG = ("one", "pp2", "recomputed", "small microbatches")


@pytest.fixture
def tiny_qwen(shallow_qwen):
    """Two layers instead of four, because no test here depends on several layers in a pipeline rank."""
    return shallow_qwen


async def shared_and_plain(ranks, folder, *, num_ranks=1, trainer=None, **options):
    """Return the results of a batch with and without sharing, and the number of tokens that the first rank computed."""
    found, tokens = [], []
    options |= {"batch": make_batch(shared=5, steps=2, restricted=True), "algorithm": {"kl_coef": 0.1}}
    await ranks.processes.run(0, count_tokens)
    for share in (True, False):
        settings = ADAM | {"share_prefixes": share} | (trainer or {})
        found.append(await outcome(ranks, folder / str(share), num_ranks=num_ranks, trainer=settings, **options))
        tokens.append(await ranks.processes.run(0, count_tokens))
    return found, tokens


@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_batch_gives_the_same_from_fewer_tokens(layout, ranks, tmp_path):
    num_ranks, trainer = LAYOUTS[layout]
    run = shared_and_plain(ranks, tmp_path, num_ranks=num_ranks, trainer=trainer)
    (shared, plain), (fewer, all_tokens) = asyncio.run(run)
    assert_alike(shared, plain, 1e-5)
    assert 0 < fewer < (0.97 if layout == "small microbatches" else 0.85) * all_tokens


def test_experts_give_the_same(ranks, tiny_moe, tmp_path):
    (shared, plain), _ = asyncio.run(shared_and_plain(ranks, tmp_path, model=tiny_moe))
    assert_alike(shared, plain, 1e-5)


@pytest.mark.long
def test_layers_with_windows_give_the_same(ranks, tmp_path):
    model = make_family(tmp_path / "model", "Gemma 3")
    (shared, plain), _ = asyncio.run(shared_and_plain(ranks, tmp_path, model=model))
    assert_alike(shared, plain, 1e-5)


@pytest.mark.long
def test_shared_rows_are_captured_whole(ranks, tmp_path):
    async def run():
        await ranks.processes.run(0, capture_graphs, True)
        try:
            return await shared_and_plain(ranks, tmp_path, trainer={"compile": True})
        finally:
            await ranks.processes.run(0, compile_graphs)

    (shared, plain), _ = asyncio.run(run())
    assert_alike(shared, plain, 1e-5)
    assert shared.reports[-1]["train/graphs"] == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"context_parallel": 2}, "needs context_parallel = 1, got 2"),
        (
            {"transformer": {"moe_aux_loss_coeff": 0.1}},
            "cannot be used with transformer.moe_aux_loss_coeff, which counts tokens",
        ),
    ],
    ids=str,
)
def test_sharing_obstacles_are_reported_and_disable_sharing_by_default(settings, why, tiny_qwen, ranks):
    assert why in make_config(tiny_qwen, trainer=settings, ranks=2).trainer.sharing_obstacle({})
    with pytest.raises(ConfigError, match=f"trainer.share_prefixes: {why}"):
        asyncio.run(ranks.start(num_ranks=2, trainer=settings | {"share_prefixes": True}))
