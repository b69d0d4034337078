"""How the token losses of one optimizer step become one number, whoever computes which of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from plasmid.components import Reduction
from plasmid.types.batch import BatchTable


def sample_weights(
    table: BatchTable, step_samples: Sequence[int], reduction: Reduction, *, constant_length: int | None
) -> NDArray[np.float64]:
    """[N] factor of every loss token of each sample; 0 for samples that are not in the step.

    The loss of the step is the sum of weight times token loss over all its loss tokens. The weights follow from the
    table of the whole step, so splitting it over microbatches or ranks cannot change the gradient. What has no loss
    tokens still counts as one rollout or group. ``constant`` is Dr. GRPO's (Liu et al. 2025, arXiv 2503.20783).
    """
    if (reduction == "constant") != (constant_length is not None):
        raise ValueError(f"constant_length belongs to reduction 'constant', got {constant_length} with {reduction!r}")
    samples = np.asarray(step_samples, np.int64)
    weights = np.zeros(table.num_samples, np.float64)
    tokens = table.loss_tokens[samples].astype(np.float64)
    if reduction == "per-rollout":
        weights[samples] = _mean_of_means(table.rollout_index[samples], tokens)
    elif reduction == "per-prompt":
        weights[samples] = _mean_of_means(table.group_index[samples], tokens)
    elif reduction == "per-token":
        weights[samples] = 1.0 / max(tokens.sum(), 1.0)
    elif constant_length is not None:
        weights[samples] = 1.0 / (constant_length * max(len(np.unique(table.rollout_index[samples])), 1))
    return weights


def _mean_of_means(unit: NDArray[np.int64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights that average the tokens of each unit (rollout or group), then the units."""
    units, index = np.unique(unit, return_inverse=True)
    unit_tokens = np.bincount(index, weights=tokens, minlength=len(units))
    return np.asarray(1.0 / (np.maximum(unit_tokens, 1.0)[index] * len(units)), np.float64)
