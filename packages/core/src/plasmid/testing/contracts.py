"""What the loop relies on, as checks that plugin authors run on their own trainers and engines: one line of a test.

    asyncio.run(check_engine(engine, token_ids=[5, 6, 7]))
    asyncio.run(check_trainer(trainer, folder=tmp_path))

A promise that is not kept is an `AssertionError` that says which.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..protocols import RolloutEngine, Trainer
from ..types import Completion, GenerateRequest, Role, SamplingParams, StopReason
from ..types.batch import BatchRef
from .batches import random_batch

HELD_S = 0.3
"""How long a paused engine is watched for tokens that it must not draw."""


async def check_engine(
    engine: RolloutEngine,
    *,
    token_ids: Sequence[int],
    max_new_tokens: int = 8,
    temperature: float = 1.0,
    gives_kept_sets: bool = False,
    timeout_s: float = 60.0,
) -> None:
    """Check what `RolloutEngine` and `EngineClient` promise. The engine must be serving; it is again afterwards.

    ``gives_kept_sets`` is that of the engine's settings; ``temperature`` is 0 for an engine that draws without seeds.
    """
    request = GenerateRequest(
        id="contract/0#0",
        session_id="contract/0",
        token_ids=np.asarray(token_ids, np.int32),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature),
        seed=7,
        deadline_s=timeout_s,
    )
    async with asyncio.timeout(timeout_s):
        await engine.health()
        first = await _answer(engine, request)
        _check_completion(first, request)
        again = await _answer(engine, replace(request, id="contract/0#1"))
        assert first.token_ids.tolist() == again.token_ids.tolist(), "one seed must give one completion"
        await _check_pause(engine, replace(request, id="contract/0#2"), first)
        await _check_sleep(engine, replace(request, id="contract/0#3"), first)
        if gives_kept_sets:
            sampling = request.sampling.model_copy(update={"top_k": 3, "temperature": 1.0})
            restricted = replace(request, id="contract/0#4", sampling=sampling, wants_kept_set=True)
            _check_kept(await engine.client.generate(restricted), restricted)
        await engine.client.abort(["contract/unknown"])
        await engine.client.leave(["contract/unknown", "contract/0"])
        assert dict(await engine.checksum()) == dict(await engine.checksum()), "unchanged weights have one checksum"
        _check_gauges(await engine.metrics(), "engine.metrics")


async def _answer(engine: RolloutEngine, request: GenerateRequest) -> Completion:
    """The whole completion, asked for as rollouts do: an aborted request goes on where it stopped."""
    drawn: list[int] = []
    while True:
        part = await engine.client.generate(request)
        drawn += part.token_ids.tolist()
        if part.stop_reason is not StopReason.ABORT:
            return replace(part, token_ids=np.asarray(drawn, np.int32)) if len(drawn) > len(part.token_ids) else part
        so_far = np.concatenate([request.token_ids, part.token_ids])
        request = replace(request, token_ids=so_far, num_generated=request.num_generated + len(part.token_ids))


def _check_completion(completion: Completion, request: GenerateRequest) -> None:
    count = len(completion.token_ids)
    assert completion.request_id == request.id, "a completion names its request"
    assert completion.stop_reason in (StopReason.STOP, StopReason.LENGTH), f"failed: {completion.error}"
    assert completion.error is None, "an error text comes with stop reason ERROR only"
    assert 1 <= count <= request.sampling.max_new_tokens, "max_new_tokens is the longest completion"
    assert len(completion.logprobs) == count, "one log-probability for each token"
    assert np.isfinite(completion.logprobs).all() and (completion.logprobs <= 0).all(), "log-probabilities are finite"
    covered = [position for span in completion.versions for position in range(span.start, span.end)]
    assert covered == list(range(count)), "version spans cover every token once, in order"


def _check_kept(completion: Completion, request: GenerateRequest) -> None:
    _check_completion(completion, request)
    kept, count = completion.kept, len(completion.token_ids)
    assert kept is not None and kept.num_positions == count, "a kept set for each token, as it was asked for"
    assert (kept.sizes() == 3).all(), "top_k = 3 leaves three tokens"
    for token, left in zip(completion.token_ids, np.split(kept.token_ids, kept.offsets[1:-1]), strict=True):
        assert np.count_nonzero(left == token) == 1 and len(set(left.tolist())) == 3, "a token is once in its own set"
    assert (kept.log_mass <= 0).all() and (completion.logprobs <= kept.log_mass + 1e-5).all(), (
        "log_mass is that of the whole set before it was cut out, as log-probabilities are"
    )


async def _check_pause(engine: RolloutEngine, request: GenerateRequest, expected: Completion) -> None:
    await engine.pause(engine.pause_mode)
    await engine.pause(engine.pause_mode)  # the loop may pause an engine that is paused
    asked = asyncio.create_task(_answer(engine, request))
    await asyncio.sleep(HELD_S)
    assert not asked.done(), "a paused engine draws no tokens and answers no new request"
    await engine.resume()
    assert (await asked).token_ids.tolist() == expected.token_ids.tolist(), "a pause changes no completion"


async def _check_sleep(engine: RolloutEngine, request: GenerateRequest, expected: Completion) -> None:
    await engine.pause(engine.pause_mode)
    await engine.sleep()
    await engine.wake(kv_cache=False)
    await engine.wake(kv_cache=True)
    await engine.resume()
    after = await _answer(engine, request)
    assert after.token_ids.tolist() == expected.token_ids.tolist(), "sleep and wake keep the weights"


async def check_trainer(
    trainer: Trainer, *, folder: Path, roles: Sequence[Role] = (), vocab_size: int = 40, timeout_s: float = 120.0
) -> None:
    """Check what `Trainer` promises, with random batches of token ids below ``vocab_size``.

    ``roles`` are those that the algorithm needs. ``folder`` is for checkpoints.
    """
    batch = random_batch([(1, 1, 1), (1, 1, 1)], steps=2, silent=0.0, vocab_size=vocab_size)
    async with asyncio.timeout(timeout_s):
        await _check_step(trainer, batch, roles)
        finish = await trainer.save(folder / "contract")
        saved = await _logprobs(trainer, batch)
        step = trainer.step
        losses = await _check_step(trainer, replace(batch, index=1), roles)
        if finish is not None:  # what is saved is what was there when save returned
            await finish()
        await trainer.load(folder / "contract")
        assert trainer.step == step, "load takes up the number of steps"
        assert await _logprobs(trainer, batch) == saved, "load takes up the policy, bit by bit"
        again = await _check_step(trainer, replace(batch, index=1), roles)
        assert again == losses, "a run that continues from a checkpoint repeats itself, bit by bit"
        before = await _logprobs(trainer, batch)
        await trainer.offload()
        await trainer.onload()
        assert await _logprobs(trainer, batch) == before, "offload and onload change nothing"
        _check_gauges(await trainer.metrics(), "trainer.metrics")


async def _check_step(trainer: Trainer, batch: BatchRef, roles: Sequence[Role]) -> list[float]:
    before = trainer.step
    scores = await trainer.score(batch, roles)
    assert scores.batch == batch.index, "scores name their batch"
    report = await trainer.train(batch, scores)
    assert len(report.steps) == batch.steps, "one set of metrics for each optimizer step"
    assert trainer.step == before + batch.steps, "step counts optimizer steps"
    losses = [float(metrics["train/loss"]) for metrics in report.steps]
    assert all(map(math.isfinite, losses)), "train/loss is a number"
    return losses


async def _logprobs(trainer: Trainer, batch: BatchRef) -> list[list[float]]:
    found = await trainer.logprobs(batch)
    lengths = [int(length) for group in batch.groups for length in group.lengths]
    assert [len(array) for array in found] == lengths, "logprobs come per sample, in the order of the batch"
    return [np.asarray(array).tolist() for array in found]


def _check_gauges(metrics: Mapping[str, float], what: str) -> None:
    wrong = {name: value for name, value in metrics.items() if "/" not in name or not math.isfinite(value)}
    assert not wrong, f"{what}: names are area/name, values are finite numbers; not so are {wrong}"
