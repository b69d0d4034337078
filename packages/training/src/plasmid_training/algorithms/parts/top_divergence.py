"""KL divergence over a teacher's top tokens and one outcome for all other tokens. T tokens, K top tokens of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Divergence = Literal["reverse", "forward"]
FLOOR = 1e-6
"""Smallest probability of all other tokens together: below it, 1 minus the sum of fp32 probabilities is rounding error.
"""


def top_divergence(direction: Divergence, policy: Tensor, teacher: Tensor) -> Tensor:
    """Return the KL [T] over K + 1 outcomes, from log-probabilities [T, K] over the whole vocabulary.

    reverse: KL(p || q), forward: KL(q || p), for the policy p and the teacher q. Merging outcomes can only lower a KL
    (data processing inequality), so this is a lower bound of the KL over the vocabulary, at least 0, and equal to it if
    K is the size of the vocabulary. Differentiable by ``policy``; the probability of the other tokens has no gradient
    below `FLOOR`.
    """
    import torch

    ours = torch.cat([policy, _log_rest(policy)], 1)
    theirs = torch.cat([teacher, _log_rest(teacher)], 1)
    p, q = (ours, theirs) if direction == "reverse" else (theirs, ours)
    divergence: Tensor = (p.exp() * (p - q)).sum(1)
    return divergence


def _log_rest(logprobs: Tensor) -> Tensor:
    """Return the log-probability [T, 1] of all tokens that are not among the K."""
    return (1 - logprobs.exp().sum(1, keepdim=True)).clamp(min=FLOOR).log()
