"""Megatron computes the same as FSDP on one batch, in every layout."""

import asyncio
from dataclasses import replace

import pytest
from megatron_cases import ADAM, FSDP_ADAM, Ranks, assert_alike, make_batch, outcome, plain_outcome
from megatron_layouts import LAYOUTS, MOE_LAYOUTS, MORE_LAYOUTS, MORE_MOE_LAYOUTS
from plasmid.types.shared_groups import LocalRef


@pytest.fixture(scope="module")
def by_fsdp(rank_processes, tmp_path_factory):
    """Return the outcome with FSDP on one rank, by model."""
    known = {}

    async def run(model, folder):
        ranks = Ranks(rank_processes, model, folder)
        found = await outcome(ranks, folder / "out", kind="fsdp", trainer=FSDP_ADAM)
        await ranks.close()
        return found

    def give(model):
        if model not in known:
            known[model] = asyncio.run(run(model, tmp_path_factory.mktemp("fsdp")))
        return known[model]

    return give


@pytest.fixture(scope="module")
def by_transformers(tiny_moe, tmp_path_factory):
    """Return the outcome of the mixture of experts with transformers, unsharded."""
    return plain_outcome(tiny_moe, tmp_path_factory.mktemp("plain"))


async def check(ranks, folder, layout, expected, **options):
    num_ranks, trainer = layout
    found = await outcome(ranks, folder / "out", num_ranks=num_ranks, trainer=ADAM | trainer, **options)
    assert_alike(found, expected, 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_batch_gives_what_fsdp_gives(layout, ranks, by_fsdp, tiny_qwen, tmp_path):
    asyncio.run(check(ranks, tmp_path, LAYOUTS[layout], by_fsdp(tiny_qwen)))


@pytest.mark.long
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_one_batch_gives_what_fsdp_gives_in_other_layouts(layout, ranks, by_fsdp, tiny_qwen, tmp_path):
    asyncio.run(check(ranks, tmp_path, MORE_LAYOUTS[layout], by_fsdp(tiny_qwen)))


@pytest.mark.parametrize("layout", ["pp2", *(pytest.param(name, marks=pytest.mark.long) for name in ("one", "tp2"))])
def test_a_head_that_is_the_embedding_learns_as_with_fsdp(layout, ranks, by_fsdp, tiny_tied, tmp_path):
    asyncio.run(check(ranks, tmp_path, LAYOUTS[layout], by_fsdp(tiny_tied), model=tiny_tied))


@pytest.mark.parametrize("layout", ["ep2", pytest.param("one", marks=pytest.mark.long)])
def test_experts_learn_as_with_transformers(layout, ranks, by_transformers, tiny_moe, tmp_path):
    asyncio.run(check(ranks, tmp_path, MOE_LAYOUTS[layout], by_transformers, model=tiny_moe))


@pytest.mark.long
def test_experts_learn_as_with_fsdp(ranks, by_fsdp, tiny_moe, tmp_path):
    asyncio.run(check(ranks, tmp_path, MOE_LAYOUTS["ep2"], by_fsdp(tiny_moe), model=tiny_moe))


@pytest.mark.long
@pytest.mark.parametrize("layout", MORE_MOE_LAYOUTS)
def test_experts_learn_as_with_transformers_in_other_layouts(layout, ranks, by_transformers, tiny_moe, tmp_path):
    asyncio.run(check(ranks, tmp_path, MORE_MOE_LAYOUTS[layout], by_transformers, model=tiny_moe))


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(n, marks=pytest.mark.long) for n in ("one", "pp2", "dp2", "cp2"))]
)
def test_padding_that_was_drawn_is_embedded_as_with_fsdp_and_not_trained(layout, ranks, tiny_tied, tmp_path):
    """A new model embeds padding as zeros, for which a norm would have gradients in the thousands."""
    batch = with_padding(make_batch())
    num_ranks, trainer = LAYOUTS[layout]

    async def run():
        options = {"batch": batch, "model": tiny_tied}
        theirs = await outcome(ranks, tmp_path / "fsdp", kind="fsdp", trainer=FSDP_ADAM, **options)
        ours = await outcome(ranks, tmp_path / "out", num_ranks=num_ranks, trainer=ADAM | trainer, **options)
        assert theirs.reports[0]["train/grad_norm"] < 100
        assert_alike(ours, theirs, 1e-5)

    asyncio.run(run())


def with_padding(batch):
    """Return the batch with a padding token in the middle of every sample."""
    groups = []
    for group in batch.groups:
        rows = group.rows.get()
        token_ids = rows.token_ids.copy()
        token_ids[rows.offsets[:-1] + 3] = 0
        groups.append(replace(group, rows=LocalRef(replace(rows, token_ids=token_ids))))
    return replace(batch, groups=tuple(groups))


def test_several_steps_on_a_batch_give_what_fsdp_gives(ranks, tmp_path):
    """Advantages are computed once, each step has its own weights, and the ratio differs from 1 after the first
    step."""
    options = {"batch": make_batch(steps=2, num_groups=2), "algorithm": {"kl_coef": 0.1}}

    async def run():
        theirs = await outcome(ranks, tmp_path / "fsdp", kind="fsdp", trainer=FSDP_ADAM, **options)
        trainer = ADAM | {"tensor_parallel": 2}
        ours = await outcome(ranks, tmp_path / "megatron", num_ranks=2, trainer=trainer, **options)
        assert_alike(ours, theirs, 1e-5)

    asyncio.run(run())


def test_entropy_in_the_loss_gives_what_fsdp_gives(ranks, tmp_path):
    options = {"algorithm": {"entropy_coef": 0.01}}

    async def run():
        theirs = await outcome(ranks, tmp_path / "fsdp", kind="fsdp", trainer=FSDP_ADAM, **options)
        trainer = ADAM | {"context_parallel": 2}
        ours = await outcome(ranks, tmp_path / "megatron", num_ranks=2, trainer=trainer, **options)
        assert_alike(ours, theirs, 1e-5)

    asyncio.run(run())
