"""The KL to the reference model as a part of the reward (Stiennon et al. 2020, arXiv 2009.01325)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..batch import BatchTable
from .inputs import AdvantageInputs
from .kl import KLEstimator, kl_estimate
from .returns import last_tokens


def token_kl(inputs: AdvantageInputs, estimator: KLEstimator, *, old_policy: str) -> Tensor:
    """[T] float64 estimate of KL(policy || reference) of each token, with the policy before the first step."""
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
    rewards = torch.from_numpy(inputs.table.rewards).to(inputs.sample_index.device)[inputs.sample_index]
    paid = torch.where(last_tokens(inputs.sample_index), rewards, 0.0)
    return paid if penalty is None else paid - penalty
