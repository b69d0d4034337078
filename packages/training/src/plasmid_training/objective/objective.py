"""Advantages and losses of a rank: builds the inputs of the algorithm, calls it, and sums its weighted token losses.

Shapes: this rank has n samples and T tokens (`RankBatch.fetch`), the whole batch has N samples, a microbatch has P loss
tokens. The per-token scores of a role are one tensor [T], aligned with the rank's rows and indexed by
`Microbatch.token_index`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.components import ActorCritic, Algorithm, Reduction
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs, ValueInputs
from plasmid.types import Role
from plasmid.types.batch import BatchTable, Rows
from torch import Tensor

from ..algorithm_calls import call_advantages, call_loss, call_returns, call_value_loss
from ..batches.collate import Microbatch
from ..batches.rank_batch import RankBatch
from ..head.kept_tokens import KeptTokens
from ..head.logprobs import TokenScores
from ..head.token_loss import ChunkLoss
from .metrics import AllReduce, MicrobatchLoss, log_ratio_counts, mismatch_values


def sample_weights(
    table: BatchTable, step_samples: Sequence[int], reduction: Reduction, *, constant_length: int | None
) -> NDArray[np.float64]:
    """Return the weight [N] of each sample's loss tokens; 0 for samples outside of the step.

    The loss of the step is the sum of weight times token loss over its loss tokens. Weights are computed from the table
    of the whole step, so splitting it over microbatches or ranks does not change the gradient. Rollouts and groups
    without loss tokens still count. ``constant`` is Dr. GRPO's (Liu et al. 2025, arXiv 2503.20783).
    """
    if (reduction == "constant") != (constant_length is not None):
        raise ValueError(f"constant_length requires reduction = 'constant', got {constant_length} with {reduction!r}")
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
    """Return weights that average over the tokens of each unit (rollout or group), then over units."""
    units, index = np.unique(unit, return_inverse=True)
    unit_tokens = np.bincount(index, weights=tokens, minlength=len(units))
    return np.asarray(1.0 / (np.maximum(unit_tokens, 1.0)[index] * len(units)), np.float64)


RoleScores = Mapping[Role, Tensor]
"""[T] each: log-probabilities (for the critic: values) of the loss tokens; other tokens are undefined."""


def advantage_inputs(
    batch: RankBatch, rows: Rows, scores: RoleScores, *, all_reduce: AllReduce, device: torch.device | str = "cpu"
) -> AdvantageInputs:
    """Build the inputs from which the algorithm computes the advantages of this rank's loss tokens, once per batch."""
    places = np.flatnonzero(rows.loss_mask)
    token = torch.from_numpy(places).to(device)

    def on_device(values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values[places].astype(np.int64)).to(device)

    def read_kept() -> KeptTokens | None:
        return None if rows.kept is None else KeptTokens.of(rows.kept.select(places)).to(device)

    owner = np.repeat(np.asarray(batch.samples, np.int64), rows.lengths())[places]
    picked = {role: values[token] for role, values in scores.items()}
    return AdvantageInputs(
        table=batch.table,
        sample_index=torch.from_numpy(owner).to(device),
        token_ids=on_device(rows.token_ids),
        versions=on_device(rows.versions),
        rollout_logprobs=torch.from_numpy(rows.behaviour_logprobs(places)).to(device),
        old_logprobs=picked.get(Role.POLICY),
        ref_logprobs=picked.get(Role.REFERENCE),
        teacher_logprobs=picked.get(Role.TEACHER),
        values=picked.get(Role.CRITIC),
        all_reduce=all_reduce,
        read_metadata=lambda: batch.metadata,
        read_kept=read_kept,
        **_turns(rows, places, owner, batch.table, device),
    )


def _turns(
    rows: Rows, places: NDArray[np.int64], owner: NDArray[np.int64], table: BatchTable, device: torch.device | str
) -> dict[str, Tensor]:
    """Return ``token_rewards`` and ``turn_index`` of `AdvantageInputs`, if there are any."""
    if table.turn_rewards is None:
        return {}
    earned = np.full(len(places), np.nan, np.float32) if rows.token_rewards is None else rows.token_rewards[places]
    is_end = ~np.isnan(earned)
    ended = np.cumsum(is_end) - is_end  # turns that ended before each token, on this rank
    is_first = np.ones(len(owner), np.bool_)
    is_first[1:] = owner[1:] != owner[:-1]
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(owner)), 0))
    last = np.maximum((~np.isnan(table.turn_rewards)).sum(1) - 1, 0)
    index = np.minimum(ended - ended[first], last[owner])  # tokens after the last reward belong to the last turn
    return {
        "token_rewards": torch.from_numpy(np.nan_to_num(earned)).to(device),
        "turn_index": torch.from_numpy(index.astype(np.int64)).to(device),
    }


def compute_advantages(
    algorithm: Algorithm,
    batch: RankBatch,
    rows: Rows,
    scores: RoleScores,
    *,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the advantages [T] of this rank's tokens, 0 outside of the loss mask. Called once per batch."""
    inputs = advantage_inputs(batch, rows, scores, all_reduce=all_reduce, device=device)
    return scatter_to_tokens(call_advantages(algorithm, inputs), rows)


def scatter_to_tokens(values: Tensor, rows: Rows) -> Tensor:
    """Scatter ``values`` of the loss tokens to [T], 0 elsewhere; detached."""
    token = torch.from_numpy(np.flatnonzero(rows.loss_mask)).to(values.device)
    whole = values.new_zeros(len(rows.token_ids))
    whole[token] = values.detach()
    return whole


def step_weights(algorithm: Algorithm, batch: RankBatch, step: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the `sample_weights` [N] (float64) of one optimizer step of the batch."""
    weights = sample_weights(
        batch.table, batch.steps[step].samples, algorithm.reduction, constant_length=algorithm.constant_length
    )
    return torch.from_numpy(weights).to(device)


def loss_inputs(
    batch: RankBatch,
    microbatch: Microbatch,
    now: TokenScores,
    *,
    scores: RoleScores,
    advantages: Tensor,
) -> LossInputs:
    """Build the loss inputs of a microbatch collated with ``only_masked``; ``advantages`` [T] are those of the rank.

    ``now`` are the current scores of the policy.
    """
    token = microbatch.token_index
    picked = {role: values[token] for role, values in scores.items()}
    return LossInputs(
        num_samples=len(microbatch.lengths),
        sample_index=microbatch.sample_index,
        table=batch.table,
        table_index=microbatch.table_index,
        token_ids=microbatch.targets,
        versions=microbatch.versions,
        logprobs=now.logprobs,
        entropy=now.entropy,
        old_logprobs=picked.get(Role.POLICY),
        rollout_logprobs=microbatch.rollout_logprobs,
        ref_logprobs=picked.get(Role.REFERENCE),
        teacher_logprobs=picked.get(Role.TEACHER),
        advantages=advantages[token],
        top_logprobs=now.top_logprobs,
        teacher_top_logprobs=microbatch.teacher_top_logprobs,
        kept=microbatch.kept,
        read_metadata=lambda: batch.metadata,
    )


def select_tokens(inputs: LossInputs, tokens: slice | Tensor, now: TokenScores) -> LossInputs:
    """Return the loss inputs of a slice of tokens, without kept sets, for algorithms with `Algorithm.is_tokenwise`."""
    parts: dict[str, Any] = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    parts = {name: part[tokens] if isinstance(part, Tensor) else part for name, part in parts.items()}
    current = {"logprobs": now.logprobs, "entropy": now.entropy, "top_logprobs": now.top_logprobs}
    return LossInputs(**{**parts, **current, "kept": None})


def fused_loss(algorithm: Algorithm, inputs: LossInputs, weights: Tensor) -> ChunkLoss:
    """Return a function that computes the loss of a chunk of tokens; ``inputs`` need no current scores."""

    def loss(now: TokenScores, tokens: slice | Tensor) -> Tensor:
        return (call_loss(algorithm, select_tokens(inputs, tokens, now)).loss.double() * weights[tokens]).sum()

    return loss


def microbatch_loss(algorithm: Algorithm, inputs: LossInputs, weights: Tensor) -> MicrobatchLoss:
    """Sum the algorithm's token losses with the weight [P] of each token (`step_weights` at its ``table_index``).

    If the algorithm needs an engine, adds the metrics ``logprob_diff`` and ``mismatch_...``. They compare the rollout
    engine's log-probabilities with the trainer's old ones, or with its current ones if there are no old ones.
    """
    result = call_loss(algorithm, inputs)
    loss, num_tokens = (result.loss.double() * weights).sum(), inputs.logprobs.numel()
    if not algorithm.needs().engine:
        return MicrobatchLoss(loss=loss, values=result.metrics, maxima={}, num_tokens=num_tokens)
    policy = inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    difference = policy - inputs.rollout_logprobs
    return MicrobatchLoss(
        loss=loss,
        values={**result.metrics, "logprob_diff_mean": difference.abs(), **mismatch_values(difference)},
        maxima={"logprob_diff": difference.abs()},
        num_tokens=num_tokens,
        mismatch=log_ratio_counts(difference),
    )


def compute_returns(
    algorithm: ActorCritic,
    batch: RankBatch,
    rows: Rows,
    scores: RoleScores,
    *,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return targets [T] for the values of this rank's tokens, 0 outside of the loss mask. Called once per batch."""
    inputs = advantage_inputs(batch, rows, scores, all_reduce=all_reduce, device=device)
    return scatter_to_tokens(call_returns(algorithm, inputs), rows)


def value_microbatch_loss(
    algorithm: ActorCritic,
    microbatch: Microbatch,
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    weights: Tensor,
) -> MicrobatchLoss:
    """Sum the critic's token losses with the weight [P] of each token, as `microbatch_loss` does for the policy.

    ``values`` [P] are the critic's current values; ``old_values`` and ``returns`` [T] are for all tokens of the rank.
    """
    token = microbatch.token_index
    inputs = ValueInputs(values=values, old_values=old_values[token], returns=returns[token])
    result = call_value_loss(algorithm, inputs)
    return MicrobatchLoss(
        loss=(result.loss.double() * weights).sum(), values=result.metrics, maxima={}, num_tokens=values.numel()
    )


def explained_variance(values: Tensor, returns: Tensor, all_reduce: AllReduce) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns) over the loss tokens of all ranks; None if Var(returns) is 0.

    1 for a critic that predicts the returns exactly, 0 for one that predicts their mean. Uses two passes in float64,
    because E[x^2] - E[x]^2 cancels if the mean is large.
    """
    pair = torch.stack([returns.double(), (returns - values).double()])
    count = all_reduce(pair.new_tensor(float(pair.shape[1])))
    means = all_reduce(pair.sum(1)) / count.clamp(min=1)
    squares = all_reduce((pair - means[:, None]).square().sum(1))
    total, left = squares.tolist()
    return 1 - left / total if total > 0 else None
