"""Rewards, returns and advantages of every token. T tokens, sample after sample, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .kl import KLEstimator, kl_estimate

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs
    from plasmid.types.batch import BatchTable
    from torch import Tensor


def token_kl(inputs: AdvantageInputs, estimator: KLEstimator, *, old_policy: str) -> Tensor:
    """[T] float64 estimate of KL(policy || reference) of each token, with the policy before the first step.

    As a part of the reward: Stiennon et al. 2020, arXiv 2009.01325.
    """
    policy = inputs.rollout_logprobs if old_policy == "rollout" else inputs.old_logprobs
    if policy is None or inputs.ref_logprobs is None:
        raise ValueError("policy and reference must be scored for the KL in the reward")
    return kl_estimate(estimator, policy.double(), inputs.ref_logprobs.double())


def penalised_table(inputs: AdvantageInputs, penalty: Tensor | None) -> BatchTable:
    """The table with the rewards less the penalties [T] of all tokens of each sample, wherever they are held."""
    if penalty is None:
        return inputs.table
    sums = inputs.per_sample_sum(penalty).cpu().numpy()
    return replace(inputs.table, rewards=inputs.table.rewards - sums)


def token_rewards(inputs: AdvantageInputs, penalty: Tensor | None) -> Tensor:
    """[T] float64: minus the penalty of each token, and the sample's reward on its last loss token."""
    import torch

    rewards = torch.from_numpy(inputs.table.rewards).to(inputs.sample_index.device)[inputs.sample_index]
    paid = torch.where(last_tokens(inputs.sample_index), rewards, 0.0)
    return paid if penalty is None else paid - penalty


def last_tokens(sample_index: Tensor) -> Tensor:
    """[T] bool: True on the last loss token of each sample, which is where its reward is paid."""
    import torch

    last = torch.ones_like(sample_index, dtype=torch.bool)
    last[:-1] = sample_index[1:] != sample_index[:-1]
    return last


def following(values: Tensor, sample_index: Tensor) -> Tensor:
    """[T] the value of the sample's next token; 0 after the last one."""
    import torch

    after = torch.zeros_like(values)
    after[:-1] = values[1:]
    return torch.where(last_tokens(sample_index), 0.0, after)


def discounted_sums(values: Tensor, sample_index: Tensor, factor: float) -> Tensor:
    """[T] sum of factor^k x the value k tokens later, to the end of the sample.

    Tokens that the loss does not see (tool replies) are no steps. Doubles the reach of every sum in each pass, so
    there are log2(longest sample) passes over T instead of one step after another.
    """
    import torch

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
    import torch

    own = values.double()
    count, total = inputs.all_reduce(torch.stack([own.new_tensor(float(own.numel())), own.sum()]))
    centred: Tensor = own - total / count.clamp(min=1)
    squares = inputs.all_reduce((centred * centred).sum())
    if float(count) < 2:
        return centred
    scaled: Tensor = centred * (squares / (count - 1) + eps).rsqrt()
    return scaled
