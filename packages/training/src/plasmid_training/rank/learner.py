"""Policy and critic of one rank: scores of its samples, and optimizer steps on them.

All ranks call every method together. Scores, advantages, returns and losses exist on ranks that have the loss only
(`PeerRanks.has_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from plasmid.components import ActorCritic, Algorithm
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from torch import Tensor

from ..batches.collate import Microbatch, collate
from ..batches.rank_batch import RankBatch, RankStep
from ..head.logprobs import TokenScores
from ..learning_rate import learning_rate
from ..objective.critic import compute_returns, explained_variance, value_microbatch_loss
from ..objective.metrics import StepMetrics
from ..objective.objective import (
    MicrobatchLoss,
    RoleScores,
    compute_advantages,
    loss_inputs,
    microbatch_loss,
    step_weights,
)
from .backend import RankModel
from .frozen import FrozenModel
from .peers import PeerRanks

ComputeLoss = Callable[[Microbatch, Any, Tensor], MicrobatchLoss]
"""Loss of a microbatch from the model's output for it and the weights [P] of its tokens."""


class TrainedModel:
    """One rank's part of a model, its optimizer, and its optimizer steps so far."""

    def __init__(self, model: RankModel, *, algorithm: Algorithm, peers: PeerRanks, total_steps: int) -> None:
        """``total_steps`` of the run end the decay of the learning rate."""
        self.model, self._optimizer = model, model.make_optimizer()
        self.step = 0
        """Optimizer steps since the start of the run, those that were skipped included."""
        self._algorithm, self._peers, self._total_steps = algorithm, peers, total_steps

    def train_step(
        self, batch: RankBatch, rows: Rows, index: int, compute_loss: ComputeLoss, *, prefix: str = "", **options: bool
    ) -> dict[str, float]:
        """Take optimizer step ``index`` of a batch; metrics of the step.

        They are ``train/<prefix>grad_norm``, ``lr``, ``skipped``, and on ranks that have the loss those of the loss.
        """
        weights = step_weights(self._algorithm, batch, index, device=self._peers.device)
        metrics = StepMetrics()

        def consume(microbatch: Microbatch, output: Any) -> Tensor:
            result = compute_loss(microbatch, output, weights[microbatch.table_index])
            metrics.add(
                loss=result.loss,
                values=result.values,
                maxima=result.maxima,
                num_tokens=result.num_tokens,
                mismatch=result.mismatch,
            )
            return result.loss

        self.model.run(microbatches(batch, rows, batch.steps[index]), consume, train=True, **options)
        lr = learning_rate(self.model.learning, step=self.step, total_steps=self._total_steps)
        update = self._optimizer.step(lr)
        self.step += 1
        report = {
            f"train/{prefix}grad_norm": update.norm,
            f"train/{prefix}lr": lr,
            f"train/{prefix}skipped": float(not update.taken),
        }
        return report | (self._peers.reduce(metrics) if self._peers.has_loss else {})


@dataclass(slots=True, kw_only=True, eq=False)
class Critic:
    """One rank's critic."""

    trained: TrainedModel
    algorithm: ActorCritic
    peers: PeerRanks

    def values(self, batch: RankBatch, rows: Rows) -> Tensor:
        """[T] the value of the text before each of the rank's loss tokens; 0 at other tokens."""
        return token_outputs(self.trained.model, batch, rows, device=self.peers.device)

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> tuple[dict[str, float], ...]:
        """All optimizer steps of a batch towards the algorithm's returns; metrics of each.

        ``train/explained_variance`` is that of the values before the first step.
        """
        old_values = scores[Role.CRITIC]
        returns = torch.zeros(len(rows.token_ids), device=self.peers.device)
        of_batch: dict[str, float] = {}
        if self.peers.has_loss:
            all_reduce, device = self.peers.all_reduce, self.peers.device
            returns = compute_returns(self.algorithm, batch, rows, scores, all_reduce=all_reduce, device=device)
            seen = torch.from_numpy(rows.loss_mask).to(device)
            explained = explained_variance(old_values[seen], returns[seen], all_reduce)
            of_batch = {} if explained is None else {"train/explained_variance": explained}
        loss = partial(self._loss, old_values, returns)
        reports = []
        for index in range(len(batch.steps)):
            report = self.trained.train_step(batch, rows, index, loss, prefix="critic_")
            if self.peers.has_loss:
                report["train/value_loss"] = report.pop("train/loss")
            reports.append(report | of_batch)
        return tuple(reports)

    def _loss(
        self, old_values: Tensor, returns: Tensor, microbatch: Microbatch, values: Tensor, weights: Tensor
    ) -> MicrobatchLoss:
        return value_microbatch_loss(
            self.algorithm, microbatch, values, old_values=old_values, returns=returns, weights=weights
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Learner:
    """One rank's part of every model."""

    policy: TrainedModel
    critic: Critic | None
    critic_warmup: int
    """Batches at the start of the run in which the critic alone is trained."""
    frozen: Mapping[Role, FrozenModel]
    """Reference and teacher, as the algorithm needs them."""
    algorithm: Algorithm
    peers: PeerRanks
    step_metrics: Callable[[], dict[str, float]]
    """The backend's."""

    def score(self, batch: RankBatch, rows: Rows, role: Role) -> Tensor:
        """[T] the role's scores of the rank's loss tokens; 0 at other tokens."""
        if role is Role.POLICY:
            return token_outputs(self.policy.model, batch, rows, device=self.peers.device)
        if role is Role.CRITIC and self.critic is not None:
            return self.critic.values(batch, rows)
        if role not in self.frozen:
            raise ValueError(f"this trainer holds no {role.value}")
        with self.frozen[role].ready() as model:
            return token_outputs(model, batch, rows, device=self.peers.device)

    def logprobs(self, batch: RankBatch, rows: Rows) -> tuple[Floats, ...]:
        """[L] of every sample of the rank: the policy's log-probability of each token; 0 for the first."""
        flat = token_outputs(self.policy.model, batch, rows, device=self.peers.device, only_masked=False)
        return tuple(np.split(flat.cpu().numpy(), rows.offsets[1:-1])) if rows.num_samples else ()

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> tuple[dict[str, float], ...]:
        """Metrics of every optimizer step on a batch: the policy's, the critic's, or both.

        While the critic warms up, the policy stays at its optimizer step.
        """
        if self.critic is None:
            return self._train_policy(batch, rows, scores)
        if batch.index < self.critic_warmup:
            step = {"train/step": float(self.policy.step)}
            return tuple(report | step for report in self.critic.train(batch, rows, scores))
        reports = self._train_policy(batch, rows, scores)
        return tuple(a | b for a, b in zip(reports, self.critic.train(batch, rows, scores), strict=True))

    def trained(self) -> Mapping[str, TrainedModel]:
        """Policy and critic, by role."""
        critic = {} if self.critic is None else {Role.CRITIC.value: self.critic.trained}
        return {Role.POLICY.value: self.policy} | critic

    def _train_policy(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> tuple[dict[str, float], ...]:
        advantages = torch.zeros(len(rows.token_ids), device=self.peers.device)
        if self.peers.has_loss:
            advantages = compute_advantages(
                self.algorithm, batch, rows, scores, all_reduce=self.peers.all_reduce, device=self.peers.device
            )
        loss = partial(self._loss, batch, scores, advantages)
        entropy_grad = self.algorithm.weights_need_entropy()
        reports = []
        for index in range(len(batch.steps)):
            report = self.policy.train_step(batch, rows, index, loss, with_entropy=True, entropy_grad=entropy_grad)
            reports.append(report | {"train/step": float(self.policy.step)} | self.step_metrics())
        return tuple(reports)

    def _loss(
        self,
        batch: RankBatch,
        scores: RoleScores,
        advantages: Tensor,
        microbatch: Microbatch,
        output: TokenScores,
        weights: Tensor,
    ) -> MicrobatchLoss:
        inputs = loss_inputs(batch, microbatch, output.logprobs, output.entropy, scores=scores, advantages=advantages)
        return microbatch_loss(self.algorithm, inputs, weights)


@torch.no_grad()
def token_outputs(
    model: RankModel, batch: RankBatch, rows: Rows, *, device: torch.device, only_masked: bool = True
) -> Tensor:
    """[T] a policy's log-probabilities or a critic's values of the rank's tokens, 0 where it was not asked.

    ``only_masked`` asks for the tokens that the loss sees, else for all but the first of each sample.
    """
    result = torch.zeros(len(rows.token_ids), device=device)

    def keep(microbatch: Microbatch, output: TokenScores | Tensor) -> Tensor:
        values = output.logprobs if isinstance(output, TokenScores) else output
        result[microbatch.token_index] = values.float()
        return result.new_zeros(())

    for step in batch.steps:
        model.run(microbatches(batch, rows, step, only_masked=only_masked), keep, train=False)
    return result


def microbatches(batch: RankBatch, rows: Rows, step: RankStep, *, only_masked: bool = True) -> Iterator[Microbatch]:
    """The rank's microbatches of one optimizer step, on the CPU."""
    for indices in step.microbatches:
        yield collate(rows, indices, table_index=batch.samples, only_masked=only_masked)
