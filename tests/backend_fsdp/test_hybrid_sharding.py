"""Copies of a model, each sharded over some of the ranks, train like one model sharded over all ranks."""

import asyncio

import pytest
from fsdp_cases import fit, largest_difference, make_batch, make_config, weights_of
from plasmid.errors import ConfigError

SETTINGS = {"lr": 1e-2, "eps": 1e-3, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01}
CRITIC = {"critic": {"lr": 1e-2, "eps": 1e-3, "head_std": 0.1, "export": True}}


async def trained(ranks, settings, folder, *, load=None, save=None, **options):
    """Train on two batches; with `load`, the second one starts from a checkpoint."""
    trainer, config = await ranks.start(trainer=settings, **options)
    reports = []
    if load is None:
        reports = await fit(trainer, config, make_batch(seed=0, index=0))
    else:
        await trainer.load(load)
    if save is not None:
        await trainer.save(save)
    reports += await fit(trainer, config, make_batch(seed=1, index=1))
    return reports, await weights_of(trainer, folder)


@pytest.mark.long  # test_groups_of_ranks_train_as_one_rank_and_continue_bit_by_bit has two copies of two shards, too
@pytest.mark.parametrize("options", [{}, {"algorithm": {"kind": "ppo", "whiten": False}}], ids=["policy", "critic"])
def test_copies_train_as_one_model_and_their_checkpoints_fit_any_sharding(four_ranks, one_rank, tmp_path, options):
    settings = SETTINGS | (CRITIC if options else {})
    hybrid = settings | {"shard_ranks": 2}
    reports, weights = asyncio.run(trained(four_ranks, hybrid, tmp_path / "a", save=tmp_path / "saved", **options))
    again, same = asyncio.run(trained(four_ranks, hybrid, tmp_path / "b", load=tmp_path / "saved", **options))
    assert again == reports[-len(again) :]
    assert largest_difference(weights, same) == 0
    plain, expected = asyncio.run(trained(one_rank, settings, tmp_path / "c", **options))
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        assert [r[key] for r in reports] == pytest.approx([r[key] for r in plain], rel=1e-5, abs=1e-7)
    assert largest_difference(weights, expected) < 2e-6
    _, elsewhere = asyncio.run(trained(one_rank, settings, tmp_path / "d", load=tmp_path / "saved", **options))
    assert largest_difference(weights, elsewhere) < 2e-6


def test_unsharded_copies_train_as_one_model(two_ranks, one_rank, tmp_path):
    reports, weights = asyncio.run(trained(two_ranks, SETTINGS | {"shard_ranks": 1}, tmp_path / "a"))
    plain, expected = asyncio.run(trained(one_rank, SETTINGS, tmp_path / "b"))
    assert [r["train/grad_norm"] for r in reports] == pytest.approx([r["train/grad_norm"] for r in plain], rel=1e-5)
    assert largest_difference(weights, expected) < 2e-6


@pytest.mark.parametrize("size", [3, 8])
def test_a_size_that_does_not_divide_the_ranks_is_refused(tiny_model, size):
    config = make_config(tiny_model, ranks=4, trainer={"shard_ranks": size})
    with pytest.raises(ConfigError, match=rf"trainer.shard_ranks: must divide placement.trainer_ranks = 4, got {size}"):
        config.trainer.check(config.view("trainer"))


def test_adapters_are_sharded_like_the_weights(two_ranks, one_rank, tmp_path):
    adapter = {"lora": {"rank": 2, "alpha": 4.0}, "lr": 1e-2, "eps": 1e-3}
    reports, weights = asyncio.run(trained(two_ranks, adapter | {"shard_ranks": 1}, tmp_path / "a"))
    plain, expected = asyncio.run(trained(one_rank, adapter, tmp_path / "b"))
    assert [r["train/grad_norm"] for r in reports] == pytest.approx([r["train/grad_norm"] for r in plain], rel=1e-5)
    assert largest_difference(weights, expected) < 2e-6


def test_a_size_that_does_not_divide_the_ranks_of_a_reference_is_refused(tiny_model):
    place = {"trainer_ranks": 4, "reference_ranks": 1}
    config = make_config(tiny_model, trainer={"shard_ranks": 2}, algorithm={"kl_coef": 0.1}, placement=place)
    with pytest.raises(ConfigError, match=r"trainer.shard_ranks: must divide placement.reference_ranks = 1, got 2"):
        config.trainer.check(config.view("trainer"))
