"""Checks of the samples that workflows return."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from plasmid.types import Sample

ARRAYS = ("token_ids", "loss_mask", "rollout_logprobs")


def find_sample_error(sample: object, *, vocab_size: int | None = None) -> str | None:
    """Return why a run cannot use this result of a workflow, or None if it can.

    Rewards, the sample store and the trainer would otherwise raise errors that do not name the workflow. Token ids must
    be below ``vocab_size``, unless it is None.
    """
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
    if sample.loss_mask[:1].any():
        return f"loss_mask {where} contains the first token, which has no log-probability; set loss_mask[0] to False"
    wrong = sample.token_ids < 0 if vocab_size is None else (sample.token_ids < 0) | (sample.token_ids >= vocab_size)
    if wrong.any():
        limit = "at least 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
        return f"token_ids {where} must be {limit}, got {sample.token_ids[wrong][0]}"
    return None
