"""The policy and the critic of one rank: scores of its samples, and optimizer steps on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from plasmid.components import Algorithm
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from torch import Tensor

from ..batches.collate import Microbatch
from ..batches.rank_batch import RankBatch
from ..head.logprobs import TokenScores
from ..objective.objective import MicrobatchLoss, RoleScores, compute_advantages, loss_inputs, microbatch_loss
from .backend import RankModel
from .critic import Critic
from .frozen import FrozenModel
from .peers import PeerRanks
from .trained_model import TrainedModel, microbatches


@dataclass(slots=True, kw_only=True, eq=False)
class Learner:
    """One rank's part of every model. All ranks call every method together.

    Scores, advantages and losses exist on ranks that have the loss only (`PeerRanks.has_loss`).
    """

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
            return self._logprobs(self.policy.model, batch, rows, only_masked=True)
        if role is Role.CRITIC and self.critic is not None:
            return self.critic.values(batch, rows)
        if role not in self.frozen:
            raise ValueError(f"this trainer holds no {role.value}")
        with self.frozen[role].ready() as model:
            return self._logprobs(model, batch, rows, only_masked=True)

    def logprobs(self, batch: RankBatch, rows: Rows) -> tuple[Floats, ...]:
        """[L] of every sample of the rank: the policy's log-probability of each token; 0 for the first."""
        flat = self._logprobs(self.policy.model, batch, rows, only_masked=False).cpu().numpy()
        return tuple(np.split(flat, rows.offsets[1:-1])) if rows.num_samples else ()

    @torch.no_grad()
    def _logprobs(self, model: RankModel, batch: RankBatch, rows: Rows, *, only_masked: bool) -> Tensor:
        result = torch.zeros(len(rows.token_ids), device=self.peers.device)

        def keep(microbatch: Microbatch, output: TokenScores) -> Tensor:
            result[microbatch.token_index] = output.logprobs.float()
            return result.new_zeros(())

        for step in batch.steps:
            model.run(microbatches(batch, rows, step, only_masked=only_masked), keep, train=False)
        return result

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
