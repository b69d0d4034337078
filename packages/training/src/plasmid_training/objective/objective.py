"""What every trainer does around its own forward pass: gather the algorithm's inputs, weigh and sum its loss.

n samples and T tokens are this rank's (`RankBatch.fetch`), N samples the whole batch's, P a microbatch's loss tokens.
Per-token scores of a role are one tensor [T], aligned to the rank's rows; `Microbatch.token_index` reads and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.components import Algorithm
from plasmid.components.objective_inputs import AdvantageInputs, LossInputs
from plasmid.types import Role
from plasmid.types.batch import Rows
from torch import Tensor

from ..algorithm_calls import call_advantages, call_loss
from ..batches.collate import Microbatch
from ..batches.rank_batch import RankBatch
from ..head.kept_tokens import KeptTokens
from .metrics import AllReduce
from .mismatch import log_ratio_counts, mismatch_values
from .reduction import sample_weights

RoleScores = Mapping[Role, Tensor]
"""[T] each: log-probabilities of the loss tokens (the critic's: values), anything elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchLoss:
    """One microbatch's part of the step's loss, and what `StepMetrics.add` takes."""

    loss: Tensor
    """Scalar; sum it over microbatches and ranks."""
    values: Mapping[str, Tensor]
    """[P] each."""
    maxima: Mapping[str, Tensor]
    """[P] each."""
    num_tokens: int
    mismatch: Tensor | None = None
    """`log_ratio_counts` of the difference between trainer and rollout engine, if there is an engine."""


def advantage_inputs(
    batch: RankBatch, rows: Rows, scores: RoleScores, *, all_reduce: AllReduce, device: torch.device | str = "cpu"
) -> AdvantageInputs:
    """What the algorithm is handed of this rank's loss tokens, once per batch."""
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
    )


def compute_advantages(
    algorithm: Algorithm,
    batch: RankBatch,
    rows: Rows,
    scores: RoleScores,
    *,
    all_reduce: AllReduce,
    device: torch.device | str = "cpu",
) -> Tensor:
    """[T] the algorithm's advantages of this rank's tokens, 0 where the loss does not look. Once per batch."""
    inputs = advantage_inputs(batch, rows, scores, all_reduce=all_reduce, device=device)
    return on_all_tokens(call_advantages(algorithm, inputs), rows)


def on_all_tokens(values: Tensor, rows: Rows) -> Tensor:
    """[T] ``values`` of the loss tokens among all of the rank's tokens, 0 elsewhere; detached."""
    token = torch.from_numpy(np.flatnonzero(rows.loss_mask)).to(values.device)
    whole = values.new_zeros(len(rows.token_ids))
    whole[token] = values.detach()
    return whole


def step_weights(algorithm: Algorithm, batch: RankBatch, step: int, *, device: torch.device | str = "cpu") -> Tensor:
    """[N] float64 `sample_weights` of one optimizer step of the batch."""
    weights = sample_weights(
        batch.table, batch.steps[step].samples, algorithm.reduction, constant_length=algorithm.constant_length
    )
    return torch.from_numpy(weights).to(device)


def loss_inputs(
    batch: RankBatch,
    microbatch: Microbatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    *,
    scores: RoleScores,
    advantages: Tensor,
) -> LossInputs:
    """What the algorithm is handed of a microbatch collated with ``only_masked``; ``advantages`` [T] are the rank's."""
    token = microbatch.token_index
    picked = {role: values[token] for role, values in scores.items()}
    return LossInputs(
        num_samples=len(microbatch.lengths),
        sample_index=microbatch.sample_index,
        table=batch.table,
        table_index=microbatch.table_index,
        token_ids=microbatch.targets,
        versions=microbatch.versions,
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=picked.get(Role.POLICY),
        rollout_logprobs=microbatch.rollout_logprobs,
        ref_logprobs=picked.get(Role.REFERENCE),
        teacher_logprobs=picked.get(Role.TEACHER),
        advantages=advantages[token],
        kept=microbatch.kept,
        read_metadata=lambda: batch.metadata,
    )


def microbatch_loss(algorithm: Algorithm, inputs: LossInputs, weights: Tensor) -> MicrobatchLoss:
    """The algorithm's token losses, summed with the weight [P] of each token (`step_weights` at its ``table_index``).

    Besides the algorithm's own metrics there are ``logprob_diff`` and ``mismatch_...``: how far trainer and rollout
    engine are apart before the first step (without old log-probabilities: now). Nothing of that without an engine.
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
