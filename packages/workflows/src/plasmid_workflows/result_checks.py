"""Checks of what workflows and environments return. Rewards, the sample store and the trainer would otherwise raise
errors that do not name the workflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from plasmid.components.interaction import Step
from plasmid.types import Sample

ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs")


def list_samples(result: object, *, vocab_size: int | None = None) -> list[Sample]:
    """Return the samples in the result of a workflow. Raises ValueError if a run cannot use them.

    Token ids must be below ``vocab_size``, unless it is None.
    """
    if isinstance(result, Sample) or not isinstance(result, Iterable):
        raise ValueError(f"must return a list of samples, got one value of type {type(result).__name__}")
    samples = list(result)
    if not samples:
        raise ValueError("must return at least one sample")
    for sample in samples:
        if (mistake := find_sample_error(sample, vocab_size=vocab_size)) is not None:
            raise ValueError(mistake)
    if len({sample.id for sample in samples}) < len(samples):
        raise ValueError(f"must return samples with distinct ids, got {[sample.id for sample in samples]!r:.100}")
    return samples


def find_sample_error(sample: object, *, vocab_size: int | None = None) -> str | None:
    """Return why a run cannot use this sample, or None if it can."""
    if not isinstance(sample, Sample):
        return f"must return samples, got one of type {type(sample).__name__}"
    where = f"of sample {sample.id}"
    for name in ARRAYS:
        if not isinstance(getattr(sample, name), np.ndarray):
            return f"{name} {where} must be a NumPy array, got {getattr(sample, name)!r:.100}"
    if not isinstance(sample.text, str):
        return f"text {where} must be a string, got {sample.text!r:.100}"
    if not isinstance(sample.metadata, Mapping):
        return f"metadata {where} must be a mapping, got {sample.metadata!r:.100}"
    if sample.is_baseline:
        return f"is_baseline {where} must be False: the run itself adds the greedy rollout"
    if sample.loss_mask[:1].any():
        return f"loss_mask {where} contains the first token, which has no log-probability; set loss_mask[0] to False"
    wrong = sample.token_ids < 0 if vocab_size is None else (sample.token_ids < 0) | (sample.token_ids >= vocab_size)
    if wrong.any():
        limit = "at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
        return f"token_ids {where} must be {limit}, got {sample.token_ids[wrong][0]}"
    return None


def find_step_error(step: object) -> str | None:
    """Return why an episode cannot use this result of `step`, or None if it can."""
    if not isinstance(step, Step):
        return f"must return a Step, got {step!r:.200}"
    if not _is_finite(step.reward):
        return f"must return a finite reward, got {step.reward!r:.200}"
    if not isinstance(step.info, Mapping):
        return f"must return info as a mapping, got {step.info!r:.200}"
    return None


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # a text, a tensor of several values, a large integer
        return False
