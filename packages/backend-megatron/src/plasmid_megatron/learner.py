"""The policy on one rank: scores of its samples, and optimizer steps on them. Knows nothing of processes or files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from plasmid.components import Algorithm
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from plasmid_training.batches.rank_batch import RankBatch
from plasmid_training.head.logprobs import TokenScores
from plasmid_training.objective.actor_critic import StepReports
from plasmid_training.objective.metrics import StepMetrics
from plasmid_training.objective.objective import (
    RoleScores,
    compute_advantages,
    loss_inputs,
    microbatch_loss,
    step_weights,
)
from torch import Tensor, nn

from .build import Network
from .frozen import Frozen
from .layout import Ranks, on_last_stage
from .optimizer import Updater
from .packing import Packed
from .passes import microbatches, run
from .settings import Megatron


@dataclass(slots=True, kw_only=True, eq=False)
class Learner:
    """One rank's part of the policy and everything that changes it. All ranks call every method together.

    Scores, advantages and losses exist on the last pipeline rank of every model replica only.
    """

    network: Network
    chunks: Sequence[nn.Module]
    """Those of ``network``, wrapped."""
    updater: Updater
    algorithm: Algorithm
    ranks: Ranks
    settings: Megatron
    frozen: Mapping[Role, Frozen] = field(default_factory=dict)
    """Reference and teacher, as the algorithm needs them."""

    def score(self, batch: RankBatch, rows: Rows, role: Role) -> Tensor:
        """[T] the role's log-probabilities of the rank's loss tokens; 0 at other tokens."""
        if role is Role.POLICY:
            return self._logprobs(self.chunks, batch, rows, only_masked=True)
        if role not in self.frozen:
            raise ValueError(f"this trainer holds no {role.value}")
        with self.frozen[role].ready(self.chunks) as chunks:
            return self._logprobs(chunks, batch, rows, only_masked=True)

    def logprobs(self, batch: RankBatch, rows: Rows) -> tuple[Floats, ...]:
        """[L] of every sample of the rank: the policy's log-probability of each token; 0 for the first."""
        flat = self._logprobs(self.chunks, batch, rows, only_masked=False).cpu().numpy()
        return tuple(np.split(flat, rows.offsets[1:-1])) if rows.num_samples else ()

    @torch.no_grad()
    def _logprobs(self, chunks: Sequence[nn.Module], batch: RankBatch, rows: Rows, *, only_masked: bool) -> Tensor:
        result = torch.zeros(len(rows.token_ids), device=self.ranks.device)

        def keep(packed: Packed, output: TokenScores) -> Tensor:
            result[packed.batch.token_index] = output.logprobs.float()
            return result.new_zeros(())

        for step in batch.steps:
            parts = microbatches(batch, rows, step, self.settings, device=self.ranks.device, only_masked=only_masked)
            run(chunks, parts, keep, train=False)
        return result

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """All optimizer steps of a batch; metrics of each, the same on the last pipeline rank of every replica."""
        advantages = torch.zeros(len(rows.token_ids), device=self.ranks.device)
        if on_last_stage():
            advantages = compute_advantages(
                self.algorithm, batch, rows, scores, all_reduce=self.ranks.all_reduce, device=self.ranks.device
            )
        return tuple(self._step(batch, rows, scores, advantages, index) for index in range(len(batch.steps)))

    def _step(
        self, batch: RankBatch, rows: Rows, scores: RoleScores, advantages: Tensor, index: int
    ) -> dict[str, float]:
        weights = step_weights(self.algorithm, batch, index, device=self.ranks.device)
        metrics = StepMetrics()

        def loss(packed: Packed, output: TokenScores) -> Tensor:
            inputs = loss_inputs(
                batch, packed.batch, output.logprobs, output.entropy, scores=scores, advantages=advantages
            )
            result = microbatch_loss(self.algorithm, inputs, weights[packed.batch.table_index])
            metrics.add(
                loss=result.loss,
                values=result.values,
                maxima=result.maxima,
                num_tokens=result.num_tokens,
                mismatch=result.mismatch,
            )
            return result.loss

        parts = microbatches(batch, rows, batch.steps[index], self.settings, device=self.ranks.device)
        entropy_grad = self.algorithm.weights_need_entropy()
        run(self.chunks, parts, loss, train=True, with_entropy=True, entropy_grad=entropy_grad)
        update = self.updater.update()
        return {
            "train/grad_norm": update.norm,
            "train/lr": update.lr,
            "train/skipped": float(not update.taken),
            "train/step": float(self.updater.step),
        } | (self.ranks.reduce(metrics) if on_last_stage() else {})
