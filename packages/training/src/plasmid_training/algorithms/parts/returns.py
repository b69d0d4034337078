"""Per-token rewards, returns and advantages. T tokens, sample after sample, in order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .kl import KLEstimator, kl_estimate

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs
    from plasmid.types.batch import BatchTable
    from torch import Tensor


def token_kl(inputs: AdvantageInputs, estimator: KLEstimator, *, old_policy: str) -> Tensor:
    """Return estimates [T] (float64) of KL(policy || reference) per token, with the policy before the first step.

    The KL as a part of the reward follows Stiennon et al. 2020, arXiv 2009.01325.
    """
    policy = inputs.rollout_logprobs if old_policy == "rollout" else inputs.old_logprobs
    if policy is None or inputs.ref_logprobs is None:
        raise ValueError("the KL in the reward needs the scores of policy and reference")
    return kl_estimate(estimator, policy.double(), inputs.ref_logprobs.double())


def subtract_penalties(inputs: AdvantageInputs, penalty: Tensor | None) -> BatchTable:
    """Return the table with each sample's penalties [T] subtracted from its reward, summed over the ranks."""
    if penalty is None:
        return inputs.table
    sums = inputs.per_sample_sum(penalty).cpu().numpy()
    return replace(inputs.table, rewards=inputs.table.rewards - sums)


def token_rewards(inputs: AdvantageInputs, penalty: Tensor | None) -> Tensor:
    """Return the reward [T] (float64) of each token: the reward earned at it minus its penalty. The rest of a sample's
    reward is added at its last loss token."""
    import torch

    rewards = torch.from_numpy(inputs.table.rewards).to(inputs.sample_index.device)
    earned = torch.zeros_like(rewards[inputs.sample_index])
    if inputs.token_rewards is not None:
        earned = inputs.token_rewards.double()
        rewards = rewards - torch.zeros_like(rewards).index_add(0, inputs.sample_index, earned)
    paid = torch.where(last_tokens(inputs.sample_index), rewards[inputs.sample_index], 0.0) + earned
    return paid if penalty is None else paid - penalty


def last_tokens(sample_index: Tensor) -> Tensor:
    """Return a mask [T]: True on the last loss token of each sample, which gets the sample's reward."""
    import torch

    last = torch.ones_like(sample_index, dtype=torch.bool)
    last[:-1] = sample_index[1:] != sample_index[:-1]
    return last


def next_values(values: Tensor, sample_index: Tensor) -> Tensor:
    """Return the value [T] of the next token of the same sample; 0 for its last token."""
    import torch

    after = torch.zeros_like(values)
    after[:-1] = values[1:]
    return torch.where(last_tokens(sample_index), 0.0, after)


def discounted_sums(values: Tensor, sample_index: Tensor, factor: float) -> Tensor:
    """Return, for each token [T], the sum of factor^k x the value k tokens later, up to the end of the sample.

    Tokens outside the loss mask (tool replies) are not counted as steps. Each pass doubles the length of all sums, so
    there are log2(longest sample) passes over T instead of a sequential loop.
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
    """Return generalized advantage estimates [T] (Schulman et al. 2016, arXiv 1506.02438).

    delta_t = r_t + gamma V_(t+1) - V_t with V = 0 after the last token; A_t = delta_t + gamma lam A_(t+1).
    """
    delta = rewards + gamma * next_values(values, sample_index) - values
    return discounted_sums(delta, sample_index, gamma * lam)


def whiten(values: Tensor, inputs: AdvantageInputs, *, eps: float = 1e-8) -> Tensor:
    """Return values [T] normalized to (value - mean) / sqrt(variance + eps) over the loss tokens of all ranks.

    The variance has the divisor T - 1, with T counted over all ranks. Uses two passes in float64, because
    E[x^2] - E[x]^2 cancels if the mean is much larger than the standard deviation.
    With fewer than two tokens there is no variance, and values are only centered.
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
