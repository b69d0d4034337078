"""Random scored batches in this process, for tests of trainers and algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from plasmid.types.shared_groups import store_group

from ..types import Bools, Ints, Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from ..types.batch import BatchRef, GroupRef
from ..types.kept_sets import KeptSet, join_kept
from ..types.shared_groups import LocalStore

T = TypeVar("T")


def random_batch(
    shape: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    steps: int = 1,
    vocab_size: int = 40,
    max_completion: int = 9,
    silent: float = 0.1,
    temperatures: Sequence[float] = (1.0, 0.7),
    restricted: float = 0.0,
) -> BatchRef:
    """Create a batch in which rollout r of group g has ``shape[g][r]`` samples.

    Samples differ in length. About a fifth of their completion tokens is outside the loss, and the fraction ``silent``
    of the samples has no loss tokens. Log-probabilities are random. The fraction ``restricted`` of the generated tokens
    has a kept set of 1 to 8 tokens.
    """
    random = np.random.default_rng(seed)
    groups = []
    for group_id, rollouts in enumerate(shape):
        prompt = Prompt(id=f"p{group_id}", token_ids=_tokens(random, int(random.integers(1, 6)), vocab_size))
        rollout_ids = [f"{group_id}/r{rollout}" for rollout, count in enumerate(rollouts) for _ in range(count)]
        samples = []
        for index, rollout_id in enumerate(rollout_ids):
            completion = _tokens(random, int(random.integers(1, max_completion + 1)), vocab_size)
            mask, logprobs = _mask(random, len(completion), silent), -random.random(len(completion)) * 3
            sample = make_sample(
                prompt,
                completion,
                id=f"{group_id}/{index}",
                rollout_id=rollout_id,
                group_id=group_id,
                mask=mask,
                logprobs=logprobs,
                kept=_make_kept_set(random, completion, mask, logprobs, restricted, vocab_size) if restricted else None,
                temperature=float(random.choice(temperatures)),
                reward=float(random.normal()),
            )
            samples.append(sample)
        groups.append(make_group(prompt, samples, id=group_id))
    return BatchRef(index=0, groups=tuple(groups), steps=steps)


def make_sample(
    prompt: Prompt,
    completion: Sequence[int] | Ints,
    *,
    id: str,
    rollout_id: str,
    group_id: int = 0,
    mask: Sequence[bool] | Bools | None = None,
    logprobs: Sequence[float] | NDArray[np.float64] | None = None,
    kept: KeptSet | None = None,
    versions: Sequence[int] | None = None,
    temperature: float = 1.0,
    reward: float = 0.0,
    components: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    token_rewards: Mapping[int, float] | None = None,
) -> Sample:
    """Create a scored sample of a prompt and C completion tokens.

    ``mask`` [C] is True on generated tokens (default: all). ``logprobs`` [C] are the engine's (default: -1); other
    tokens get 0. ``kept`` has C positions. ``versions`` [C] are policy versions (default: 0).
    """
    generated = np.ones(len(completion), np.bool_) if mask is None else np.asarray(mask, np.bool_)
    by_engine = np.full(len(completion), -1.0) if logprobs is None else np.asarray(logprobs)
    start = len(prompt.token_ids)
    return Sample(
        id=id,
        rollout_id=rollout_id,
        group_id=group_id,
        prompt_id=prompt.id,
        token_ids=np.concatenate([prompt.token_ids, np.asarray(completion, np.int32)]),
        loss_mask=np.concatenate([np.zeros(start, np.bool_), generated]),
        rollout_logprobs=np.concatenate([np.zeros(start), np.where(generated, by_engine, 0.0)]).astype(np.float32),
        versions=tuple(
            VersionSpan(version=0 if versions is None else versions[i], start=start + i, end=start + i + 1)
            for i in np.flatnonzero(generated).tolist()
        ),
        sampling=SamplingParams(temperature=temperature),
        kept=join_kept([(None, start), (kept, len(completion))]),
        text="",
        stop_reason=StopReason.STOP,
        score=Score(value=reward, components=components or {}, token_rewards=token_rewards or {}),
        metadata=metadata or {},
    )


def make_group(prompt: Prompt, samples: Sequence[Sample], *, id: int = 0) -> GroupRef:
    """Create the driver's view of the scored samples of one prompt."""
    return store_group(PromptGroup(id=id, prompt=prompt, samples=tuple(samples)), LocalStore())


def _tokens(random: np.random.Generator, count: int, vocab_size: int) -> Ints:
    return random.integers(0, vocab_size, count).astype(np.int32)


def _mask(random: np.random.Generator, count: int, silent: float) -> Bools:
    mask = random.random(count) < 0.8
    mask[random.integers(count)] = True
    return mask & (random.random() >= silent)


def _make_kept_set(
    random: np.random.Generator, drawn: Ints, mask: Bools, logprobs: NDArray[np.float64], share: float, vocab_size: int
) -> KeptSet:
    """Create random kept sets that contain the generated tokens and have at least their probability."""
    chosen = mask & (random.random(len(drawn)) < share)
    nothing = np.zeros(0, np.int32)
    sets = [_around(random, t, vocab_size) if c else nothing for t, c in zip(drawn, chosen, strict=True)]
    return KeptSet.of(sets, np.where(chosen, logprobs * random.random(len(drawn)), 0.0))


def _around(random: np.random.Generator, token: int, vocab_size: int) -> Ints:
    others = random.permutation(vocab_size)[: random.integers(0, 8)]
    return np.union1d(others, [token]).astype(np.int32)
