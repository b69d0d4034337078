"""Critic targets, loss and metrics for all trainers. T tokens of this rank, P loss tokens of a microbatch."""

from __future__ import annotations

import torch
from plasmid.components import ActorCritic
from plasmid.components.objective_inputs import ValueInputs
from plasmid.types.batch import Rows
from torch import Tensor

from ..algorithm_calls import call_returns, call_value_loss
from ..batches.collate import Microbatch
from ..batches.rank_batch import RankBatch
from .metrics import AllReduce
from .objective import MicrobatchLoss, RoleScores, advantage_inputs, scatter_to_tokens


def compute_returns(
    algorithm: ActorCritic,
    batch: RankBatch,
    rows: Rows,
    scores: RoleScores,
    *,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Compute [T] the targets of the values of this rank's tokens, 0 outside the loss mask. Called once per batch."""
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
