"""Per-token scores of a model: on a rank, and of each of its samples. T tokens of a rank's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from plasmid.protocols import SampleScores
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from plasmid.types.top_tokens import TopTokens
from torch import Tensor

Scores = Tensor | TopTokens
"""[T] log-probabilities (for the critic: values), or the top tokens at the loss tokens, which stay on the host."""


def only_values(scores: Mapping[Role, Scores]) -> dict[Role, Tensor]:
    """Return the scores that are one number per token."""
    return {role: found for role, found in scores.items() if isinstance(found, Tensor)}


def split_scores(scores: Scores, rows: Rows) -> tuple[SampleScores, ...]:
    """Split the scores of the rank's tokens into those of each sample."""
    if isinstance(scores, TopTokens):
        ends = np.append(0, np.cumsum(rows.loss_mask))[rows.offsets].tolist()
        return tuple(scores.select(slice(*span)) for span in pairwise(ends))
    return split_values(scores, rows)


def split_values(values: Tensor, rows: Rows) -> tuple[Floats, ...]:
    """Split values [T] of the rank's tokens into those [L] of each sample."""
    return tuple(np.split(values.cpu().numpy(), rows.offsets[1:-1])) if rows.num_samples else ()


def join_scores(parts: Sequence[SampleScores], *, device: torch.device) -> Scores:
    """Undo `split_scores`. Of no samples, returns an empty tensor."""
    tops = [part for part in parts if isinstance(part, TopTokens)]
    if tops:
        return TopTokens.concat(tops)
    return join_values([part for part in parts if not isinstance(part, TopTokens)], device=device)


def join_values(parts: Sequence[Floats], *, device: torch.device) -> Tensor:
    """Undo `split_values`."""
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])).to(device)
