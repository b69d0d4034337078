"""Contract test of trainers, for authors of backends.

    asyncio.run(check_trainer(trainer, folder=tmp_path))

A violation raises an `AssertionError` that names it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..protocols import Trainer
from ..types import Role
from ..types.batch import BatchRef
from .batches import random_batch


async def check_trainer(
    trainer: Trainer, *, folder: Path, roles: Sequence[Role] = (), vocab_size: int = 40, timeout_s: float = 120.0
) -> None:
    """Check the contract of `Trainer` with random batches of token ids below ``vocab_size``.

    ``roles`` are the roles that the algorithm scores. Checkpoints are written to ``folder``.
    """
    batch = random_batch([(1, 1, 1), (1, 1, 1)], steps=2, silent=0.0, vocab_size=vocab_size)
    async with asyncio.timeout(timeout_s):
        await _check_step(trainer, batch, roles)
        finish = await trainer.save(folder / "contract")
        saved = await _logprobs(trainer, batch)
        step = trainer.step
        losses = await _check_step(trainer, replace(batch, index=1), roles)
        if finish is not None:  # training after `save` returned must not change what it writes
            await finish()
        await trainer.load(folder / "contract")
        assert trainer.step == step, "load must restore the number of steps"
        assert await _logprobs(trainer, batch) == saved, "load must restore the policy exactly, bit for bit"
        again = await _check_step(trainer, replace(batch, index=1), roles)
        assert again == losses, "training after load must repeat the same losses, bit for bit"
        before = await _logprobs(trainer, batch)
        await trainer.offload()
        await trainer.onload()
        assert await _logprobs(trainer, batch) == before, "offload and onload must not change the policy"
        check_gauges(await trainer.metrics(), "trainer.metrics")


async def _check_step(trainer: Trainer, batch: BatchRef, roles: Sequence[Role]) -> list[float]:
    before = trainer.step
    scores = await trainer.score(batch, roles)
    assert scores.batch == batch.index, "ScoresRef.batch must be the index of the batch"
    report = await trainer.train(batch, scores)
    assert len(report.steps) == batch.steps, "TrainReport.steps must have one entry per optimizer step"
    assert trainer.step == before + batch.steps, "Trainer.step must count optimizer steps"
    losses = [float(metrics["train/loss"]) for metrics in report.steps]
    assert all(map(math.isfinite, losses)), "train/loss must be finite"
    return losses


async def _logprobs(trainer: Trainer, batch: BatchRef) -> list[list[float]]:
    found = await trainer.logprobs(batch)
    lengths = [int(length) for group in batch.groups for length in group.lengths]
    assert [len(array) for array in found] == lengths, "logprobs must return one array per sample, in batch order"
    return [np.asarray(array).tolist() for array in found]


def check_gauges(metrics: Mapping[str, float], what: str) -> None:
    """Check names and values of metrics."""
    wrong = {name: value for name, value in metrics.items() if "/" not in name or not math.isfinite(value)}
    assert not wrong, f"{what}: names must look like area/name and values must be finite, got {wrong}"
