"""Returns and advantages of every token from rewards of every token. T tokens, sample after sample, in order."""

from __future__ import annotations

import torch
from torch import Tensor

from .inputs import AdvantageInputs


def last_tokens(sample_index: Tensor) -> Tensor:
    """[T] bool: True on the last loss token of each sample, which is where its reward is paid."""
    last = torch.ones_like(sample_index, dtype=torch.bool)
    last[:-1] = sample_index[1:] != sample_index[:-1]
    return last


def following(values: Tensor, sample_index: Tensor) -> Tensor:
    """[T] the value of the sample's next token; 0 after the last one."""
    after = torch.zeros_like(values)
    after[:-1] = values[1:]
    return torch.where(last_tokens(sample_index), 0.0, after)


def discounted_sums(values: Tensor, sample_index: Tensor, factor: float) -> Tensor:
    """[T] sum of factor^k x the value k tokens later, to the end of the sample.

    Tokens that the loss does not see (tool replies) are no steps. Doubles the reach of every sum in each pass, so
    there are log2(longest sample) passes over T instead of one step after another.
    """
    sums, reach, length = values.clone(), 1, len(values)
    while reach < length:
        same = sample_index[reach:] == sample_index[:-reach]
        if not bool(same.any()):
            break
        shifted = torch.zeros_like(sums)
        shifted[:-reach] = torch.where(same, sums[reach:], 0.0)
        sums = sums + factor**reach * shifted
        reach *= 2
    return sums


def gae(rewards: Tensor, values: Tensor, sample_index: Tensor, *, gamma: float, lam: float) -> Tensor:
    """[T] generalized advantage estimates (Schulman et al. 2016, arXiv 1506.02438).

    delta_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last token; A_t = delta_t + gamma lam A_(t+1).
    """
    delta = rewards + gamma * following(values, sample_index) - values
    return discounted_sums(delta, sample_index, gamma * lam)


def whiten(values: Tensor, inputs: AdvantageInputs, *, eps: float = 1e-8) -> Tensor:
    """[T] (value - mean) / sqrt(variance + eps) over the loss tokens of all ranks; the variance's divisor is T - 1.

    Two passes in float64, because E[x^2] - E[x]^2 loses everything where the mean is much larger than the spread.
    Without any token, or with one, there is no variance, and values are only centred.
    """
    own = values.double()
    count, total = inputs.all_reduce(torch.stack([own.new_tensor(float(own.numel())), own.sum()]))
    centred: Tensor = own - total / count.clamp(min=1)
    squares = inputs.all_reduce((centred * centred).sum())
    if float(count) < 2:
        return centred
    scaled: Tensor = centred * (squares / (count - 1) + eps).rsqrt()
    return scaled
