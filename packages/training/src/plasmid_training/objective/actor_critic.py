"""One rank's policy and, if the algorithm has one, its critic: who scores a role, who is trained on a batch."""

from __future__ import annotations

from typing import Protocol

from plasmid.types import Role
from plasmid.types.batch import Rows
from torch import Tensor

from ..batches.rank_batch import RankBatch
from .objective import RoleScores

StepReports = tuple[dict[str, float], ...]
"""Metrics of every optimizer step on one batch."""


class TrainsPolicy(Protocol):
    """The policy, and the frozen models beside it."""

    def score(self, batch: RankBatch, rows: Rows, role: Role) -> Tensor:
        """[T] per-token scores, 0 at tokens that the loss does not see."""
        ...

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """All optimizer steps of a batch."""
        ...


class TrainsCritic(Protocol):
    """The critic."""

    def values(self, batch: RankBatch, rows: Rows) -> Tensor:
        """[T] values, 0 at tokens that the loss does not see."""
        ...

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """All optimizer steps of a batch."""
        ...


def score_role(policy: TrainsPolicy, critic: TrainsCritic | None, batch: RankBatch, rows: Rows, role: Role) -> Tensor:
    """[T] scores of the rank's loss tokens for a role; 0 at other tokens. All ranks call it together."""
    if role is Role.CRITIC and critic is not None:
        return critic.values(batch, rows)
    return policy.score(batch, rows, role)


def train_both(
    policy: TrainsPolicy,
    critic: TrainsCritic | None,
    batch: RankBatch,
    rows: Rows,
    scores: RoleScores,
    *,
    warmup: int,
    step: int,
) -> StepReports:
    """Metrics of every optimizer step: the policy's, the critic's, or both. All ranks call it together.

    In the first ``warmup`` batches the critic alone is trained, and the policy stays at its optimizer step ``step``.
    """
    if critic is None:
        return policy.train(batch, rows, scores)
    if batch.index < warmup:
        return tuple(report | {"train/step": float(step)} for report in critic.train(batch, rows, scores))
    reports = policy.train(batch, rows, scores)
    return tuple(a | b for a, b in zip(reports, critic.train(batch, rows, scores), strict=True))
