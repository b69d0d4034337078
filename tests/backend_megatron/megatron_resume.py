"""Save trainers, and resume them in the same or another layout."""

import asyncio

import pytest
from megatron_cases import fit, largest_difference, small_batch, weights_of

ADAM = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.01, "optimizer": {"adam_eps": 1e-3}}


def batches(after):
    return [small_batch(seed=i, index=i) for i in range(2 + after)]


async def saved(ranks, layout, folder, *, after=1, **options):
    """Train on two batches, save, and train on `after` more."""
    trainer, config = await ranks.start(num_ranks=layout[0], trainer=ADAM | layout[1], **options)
    await fit(trainer, config, *batches(after)[:2])
    await trainer.save(folder / "saved")
    reports = await fit(trainer, config, *batches(after)[2:])
    return reports, await weights_of(trainer, folder / "a")


async def resumed(ranks, layout, folder, *, steps=2, after=1, **options):
    """Train on another batch, load, and train on `after` batches."""
    trainer, config = await ranks.start(num_ranks=layout[0], trainer=ADAM | layout[1], **options)
    await fit(trainer, config, small_batch(seed=99, index=99))
    await trainer.load(folder / "saved")
    assert trainer.step == steps
    reports = await fit(trainer, config, *batches(after)[2:])
    return reports, await weights_of(trainer, folder / "b")


def assert_continues(ranks, before, after, folder, **options):
    reports, weights = asyncio.run(saved(ranks, before, folder, **options))
    again, same = asyncio.run(resumed(ranks, after, folder, **options))
    assert [r["train/lr"] for r in again] == [r["train/lr"] for r in reports]
    assert [r["train/grad_norm"] for r in again] == pytest.approx([r["train/grad_norm"] for r in reports], rel=1e-5)
    assert largest_difference(weights, same) < 2e-6
