"""Scoring and training of the policy and the critic on one rank.

All ranks call every method together. Scores, advantages, returns and losses exist only on ranks with
`PeerRanks.has_loss`. Shapes: T tokens of a rank's samples, P scored tokens of a microbatch, L tokens of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from plasmid.components import ActorCritic, Algorithm
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from plasmid.types.top_tokens import TopChoice, TopTokens
from torch import Tensor

from ..batches.collate import Microbatch, SharedPrefixes, collate
from ..batches.peers import PeerRanks
from ..batches.rank_batch import RankBatch, RankStep
from ..batches.scores import Scores, select_values, split_values
from ..head.logprobs import TokenScores
from ..head.token_loss import ChunkLoss, LossAndScores
from ..learning_settings import LearningSettings
from ..objective.metrics import MicrobatchLoss, StepMetrics
from ..objective.objective import (
    RoleScores,
    compute_advantages,
    compute_returns,
    explained_variance,
    fused_loss,
    loss_inputs,
    microbatch_loss,
    step_weights,
    value_microbatch_loss,
)
from ..objective.token_recorder import TokenRecorder
from .backend import RankModel
from .frozen import FrozenModel, HostWeights


def learning_rate(settings: LearningSettings, *, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0, in a run of ``total_steps``."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    return settings.lr * _decay(settings, step, total_steps)


def _decay(settings: LearningSettings, step: int, total_steps: int) -> float:
    if settings.schedule == "constant":
        return 1.0
    end = total_steps if settings.decay_steps == "auto" else settings.decay_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, end - settings.warmup_steps))
    decay = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.min_lr_fraction + (1 - settings.min_lr_fraction) * decay


ComputeLoss = Callable[[Microbatch, Any, Tensor], MicrobatchLoss]
"""Computes the loss of a microbatch from the model's output and the weights [P] of its P scored tokens."""
FuseLoss = Callable[[Microbatch, Tensor], ChunkLoss]
"""Creates the `ChunkLoss` of a microbatch from the weights [P] of its tokens."""


class TrainedModel:
    """One rank's part of a model, its optimizer, and the number of optimizer steps so far."""

    def __init__(self, model: RankModel, *, algorithm: Algorithm, peers: PeerRanks, total_steps: int) -> None:
        """``total_steps`` is the number of optimizer steps of the run; the learning rate decays until then."""
        self.model, self._optimizer = model, model.make_optimizer()
        self.step = 0
        """Optimizer steps since the start of the run, including skipped ones."""
        self._algorithm, self._peers, self._total_steps = algorithm, peers, total_steps

    def train_step(
        self,
        batch: RankBatch,
        rows: Rows,
        index: int,
        compute_loss: ComputeLoss,
        *,
        prefix: str = "",
        fuse_loss: FuseLoss | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Take optimizer step ``index`` of a batch and return its metrics.

        Metrics are ``train/<prefix>grad_norm``, ``lr`` and ``skipped``, plus the loss metrics on ranks that compute the
        loss. ``prefix`` distinguishes critic and policy.
        """
        weights = step_weights(self._algorithm, batch, index, device=self._peers.device)
        metrics = StepMetrics()

        def consume(microbatch: Microbatch, output: Any) -> Tensor:
            result = compute_loss(microbatch, output, weights[microbatch.table_index])
            metrics.add(result)
            return result.loss

        if fuse_loss is not None:
            options["token_loss"] = lambda microbatch: fuse_loss(microbatch, weights[microbatch.table_index])
        self.model.run(microbatches(batch, rows, batch.steps[index]), consume, train=True, **options)
        lr = learning_rate(self.model.learning, step=self.step, total_steps=self._total_steps)
        update = self._optimizer.step(lr)
        self.step += 1
        report = {
            f"train/{prefix}grad_norm": update.norm,
            f"train/{prefix}lr": lr,
            f"train/{prefix}skipped": float(not update.taken),
        }
        if self._peers.has_loss:
            report |= metrics.reduce(self._peers.all_reduce, rank=self._peers.rank, num_ranks=self._peers.num_ranks)
        return report


@dataclass(slots=True, kw_only=True, eq=False)
class Critic:
    """One rank's critic."""

    trained: TrainedModel
    algorithm: ActorCritic
    peers: PeerRanks

    def values(self, batch: RankBatch, rows: Rows) -> Tensor:
        """Return values [T]: for each loss token of the rank, the value of the text before it; 0 for other tokens."""
        return compute_token_outputs(self.trained.model, batch, replace(rows, experts=None), device=self.peers.device)

    def train(self, batch: RankBatch, rows: Rows, old_values: Tensor, returns: Tensor) -> tuple[dict[str, float], ...]:
        """Fit the values to the returns [T]: take all optimizer steps of a batch, return the metrics of each.

        ``old_values`` [T] are those before the first step, for ``train/explained_variance`` and clipping.
        """
        rows = replace(rows, experts=None)
        batch_metrics: dict[str, float] = {}
        if self.peers.has_loss:
            mask = torch.from_numpy(rows.loss_mask).to(self.peers.device)
            explained = explained_variance(old_values[mask], returns[mask], self.peers.all_reduce)
            batch_metrics = {} if explained is None else {"train/explained_variance": explained}
        loss = partial(self._loss, old_values, returns)
        reports = []
        for index in range(len(batch.steps)):
            report = self.trained.train_step(batch, rows, index, loss, prefix="critic_")
            if self.peers.has_loss:
                report["train/value_loss"] = report.pop("train/loss")
            reports.append(report | batch_metrics)
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
    """None without a critic, and for a critic on dedicated ranks."""
    critic_warmup: int
    """Number of batches at the start of the run in which only the critic is trained."""
    frozen: Mapping[Role, FrozenModel]
    """Reference and teacher, if the algorithm needs them and they are on the trainer's ranks."""
    teacher_top: TopChoice | None
    """The choice of the teacher's top tokens; None if the teacher scores the sampled tokens."""
    reference: HostWeights | None
    """The reference, if the policy replaces it after every `reference_every` batches."""
    reference_every: int
    algorithm: Algorithm
    peers: PeerRanks
    step_metrics: Callable[[], dict[str, float]]
    """Returns the backend's own metrics of the last step (`RankBackend.step_metrics`)."""

    def score(self, batch: RankBatch, rows: Rows, role: Role) -> Scores:
        """Return the role's scores of the rank's loss tokens; log-probabilities and values of other tokens are 0."""
        if role is Role.POLICY:
            return compute_token_outputs(self.policy.model, batch, rows, device=self.peers.device)
        if role is Role.CRITIC and self.critic is not None:
            return self.critic.values(batch, rows)
        if role is Role.TEACHER and role not in self.frozen:
            return collect_given_scores(rows, self.teacher_top, device=self.peers.device)
        if role not in self.frozen:
            raise ValueError(f"this trainer has no {role.value}")
        top = self.teacher_top if role is Role.TEACHER else None
        with self.frozen[role].activate() as model:
            return compute_frozen_scores(model, batch, rows, top, device=self.peers.device)

    def logprobs(self, batch: RankBatch, rows: Rows) -> tuple[Floats, ...]:
        """Return, for each sample of the rank, the policy's log-probabilities [L] of its tokens; 0 for the first."""
        flat = compute_token_outputs(self.policy.model, batch, rows, device=self.peers.device, only_masked=False)
        return split_values(flat, rows)

    def train(
        self, batch: RankBatch, rows: Rows, scores: Mapping[Role, Scores], recorder: TokenRecorder | None = None
    ) -> tuple[dict[str, float], ...]:
        """Train on a batch; return the metrics of every optimizer step of the models on these ranks.

        During the critic's warm-up, only the critic is trained. ``recorder`` stores values of each loss token of the
        policy, such as advantages.
        """
        values = select_values(scores)
        if self.teacher_top is not None:
            values.pop(Role.TEACHER, None)  # an empty tensor on a rank without samples
            top = scores.get(Role.TEACHER)
            none = TopTokens.unknown(0, self.teacher_top.count)
            rows = replace(rows, teacher_top=top if isinstance(top, TopTokens) else none)
        reports = self._train_models(batch, rows, values, recorder)
        if self.reference is not None and (batch.index + 1) % self.reference_every == 0:
            self.reference.copy_live()
        return reports

    def _train_models(
        self, batch: RankBatch, rows: Rows, scores: RoleScores, recorder: TokenRecorder | None
    ) -> tuple[dict[str, float], ...]:
        if batch.index < self.critic_warmup:
            reports: tuple[dict[str, float], ...] = ({"train/step": float(self.policy.step)},) * len(batch.steps)
        else:
            reports = self._train_policy(batch, rows, scores, recorder)
        if self.critic is None:
            return reports
        values = self.critic.train(batch, rows, scores[Role.CRITIC], self.returns(batch, rows, scores))
        return tuple(a | b for a, b in zip(reports, values, strict=True))

    def returns(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> Tensor:
        """Return the algorithm's targets [T] of the critic's values; 0 outside of the loss mask."""
        assert isinstance(self.algorithm, ActorCritic), "only an `ActorCritic` has a critic"
        if not self.peers.has_loss:
            return torch.zeros(len(rows.token_ids), device=self.peers.device)
        all_reduce, device = self.peers.all_reduce, self.peers.device
        return compute_returns(self.algorithm, batch, rows, scores, all_reduce=all_reduce, device=device)

    def trained_models(self) -> Mapping[str, TrainedModel]:
        """Return the policy and, if there is one, the critic, by role."""
        critic = {} if self.critic is None else {Role.CRITIC.value: self.critic.trained}
        return {Role.POLICY.value: self.policy} | critic

    def _train_policy(
        self, batch: RankBatch, rows: Rows, scores: RoleScores, recorder: TokenRecorder | None
    ) -> tuple[dict[str, float], ...]:
        advantages = torch.zeros(len(rows.token_ids), device=self.peers.device)
        if self.peers.has_loss:
            advantages = compute_advantages(
                self.algorithm, batch, rows, scores, all_reduce=self.peers.all_reduce, device=self.peers.device
            )
        loss = partial(self._loss, batch, scores, advantages, recorder)
        options: dict[str, Any] = {"with_entropy": True, "entropy_grad": self.algorithm.weights_need_entropy()}
        if self.policy.model.fuses_loss and self.algorithm.is_tokenwise():
            options["fuse_loss"] = partial(self._fused_loss, batch, scores, advantages)
        reports = []
        for index in range(len(batch.steps)):
            report = self.policy.train_step(batch, rows, index, loss, **options)
            reports.append(report | {"train/step": float(self.policy.step)} | self.step_metrics())
        return tuple(reports)

    def _loss(
        self,
        batch: RankBatch,
        scores: RoleScores,
        advantages: Tensor,
        recorder: TokenRecorder | None,
        microbatch: Microbatch,
        output: TokenScores | LossAndScores,
        weights: Tensor,
    ) -> MicrobatchLoss:
        now = output.scores if isinstance(output, LossAndScores) else output
        inputs = loss_inputs(batch, microbatch, now, scores=scores, advantages=advantages)
        result = microbatch_loss(self.algorithm, inputs, weights)
        if recorder is not None:
            recorder.add(microbatch, now.logprobs, result.values)
        return replace(result, loss=output.loss) if isinstance(output, LossAndScores) else result

    def _fused_loss(
        self, batch: RankBatch, scores: RoleScores, advantages: Tensor, microbatch: Microbatch, weights: Tensor
    ) -> ChunkLoss:
        placeholder = TokenScores(torch.zeros_like(microbatch.rollout_logprobs), None)
        inputs = loss_inputs(batch, microbatch, placeholder, scores=scores, advantages=advantages)
        return fused_loss(self.algorithm, inputs, weights)


def compute_frozen_scores(
    model: RankModel, batch: RankBatch, rows: Rows, top: TopChoice | None, *, device: torch.device
) -> Scores:
    """Return a frozen model's scores of the rank's loss tokens, or with ``top`` its top tokens at them.

    Log-probabilities of other tokens are 0. The policy's experts are not replayed.
    """
    rows = replace(rows, experts=None)
    return (
        compute_token_outputs(model, batch, rows, device=device) if top is None else top_tokens(model, batch, rows, top)
    )


def collect_given_scores(rows: Rows, top: TopChoice | None, *, device: torch.device) -> Scores:
    """Return the scores [T], or with ``top`` the top tokens, that a teacher outside of the trainer computed.

    Raises ValueError if they are missing.
    """
    if top is not None:
        tokens = rows.teacher_top
        if rows.loss_mask.any() and (tokens is None or np.isnan(tokens.logprobs).any()):
            raise ValueError("this trainer has no teacher, and samples of the batch have no teacher_top")
        return TopTokens.unknown(0, top.count) if tokens is None else tokens
    values = rows.teacher_logprobs
    if values is None or np.isnan(values[rows.loss_mask]).any():
        if rows.loss_mask.any():
            raise ValueError("this trainer has no teacher, and samples of the batch have no teacher_logprobs")
        return torch.zeros(len(rows.token_ids), device=device)
    return torch.from_numpy(np.where(rows.loss_mask, values, np.float32(0))).to(device)


@torch.no_grad()
def compute_token_outputs(
    model: RankModel, batch: RankBatch, rows: Rows, *, device: torch.device, only_masked: bool = True
) -> Tensor:
    """Return a policy's log-probabilities or a critic's values [T] of the rank's tokens; 0 for tokens not scored.

    With ``only_masked``, scores only tokens in the loss mask, else all except the first token of each sample.
    """
    result = torch.zeros(len(rows.token_ids), device=device)

    def collect(microbatch: Microbatch, output: TokenScores | Tensor) -> Tensor:
        values = output.logprobs if isinstance(output, TokenScores) else output
        result[microbatch.token_index] = values.float()
        return result.new_zeros(())

    for step in batch.steps:
        model.run(microbatches(batch, rows, step, only_masked=only_masked), collect, train=False)
    return result


@torch.no_grad()
def top_tokens(model: RankModel, batch: RankBatch, rows: Rows, choice: TopChoice) -> TopTokens:
    """Return a model's top tokens at each loss token of the rank, on the host."""
    index, found = rows.loss_index(), TopTokens.unknown(int(rows.loss_mask.sum()), choice.count)

    def collect(microbatch: Microbatch, output: TokenScores) -> Tensor:
        assert output.top_ids is not None and output.top_logprobs is not None, "requested by `top`"
        places = index[microbatch.token_index.cpu().numpy()]
        found.token_ids[places] = output.top_ids.int().cpu().numpy()
        found.logprobs[places] = output.top_logprobs.float().cpu().numpy()
        return output.logprobs.new_zeros(())

    for step in batch.steps:
        model.run(microbatches(batch, rows, step), collect, train=False, top=choice)
    return found


def microbatches(batch: RankBatch, rows: Rows, step: RankStep, *, only_masked: bool = True) -> Iterator[Microbatch]:
    """Yield the microbatches of this rank for one optimizer step, on the CPU."""
    shared = None
    if batch.prefixes:
        groups = batch.table.group_index[list(batch.samples)]
        shared = SharedPrefixes(groups=groups, lengths=np.array(batch.prefixes, np.int64))
    for indices in step.microbatches:
        yield collate(rows, indices, table_index=batch.samples, only_masked=only_masked, shared=shared)
