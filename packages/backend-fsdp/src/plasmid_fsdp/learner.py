"""The policy on one rank: scores of its samples, and optimizer steps on them. Knows nothing of processes or files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from plasmid.components import Algorithm
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from plasmid_training.batches.collate import Microbatch, collate
from plasmid_training.batches.rank_batch import RankBatch, RankStep
from plasmid_training.objective.actor_critic import StepReports
from plasmid_training.objective.metrics import StepMetrics
from plasmid_training.objective.objective import (
    RoleScores,
    compute_advantages,
    loss_inputs,
    microbatch_loss,
    step_weights,
)
from torch import Tensor

from .frozen import Frozen
from .loading import compiled_graphs, reshard
from .model import Policy
from .optimizer import Updater
from .ranks import Ranks


@dataclass(slots=True, kw_only=True, eq=False)
class Learner:
    """One rank's policy and everything that changes it. All ranks call every method together."""

    policy: Policy
    updater: Updater
    algorithm: Algorithm
    ranks: Ranks
    frozen: Mapping[Role, Frozen] = field(default_factory=dict)
    """Reference and teacher, as the algorithm needs them."""

    def score(self, batch: RankBatch, rows: Rows, role: Role) -> Tensor:
        """[T] the role's log-probabilities of the rank's loss tokens; 0 at other tokens."""
        if role is Role.POLICY:
            return self._logprobs(self.policy, batch, rows, only_masked=True)
        if role not in self.frozen:
            raise ValueError(f"this trainer holds no {role.value}")
        with self.frozen[role].ready(self.policy) as model:
            return self._logprobs(model, batch, rows, only_masked=True)

    def logprobs(self, batch: RankBatch, rows: Rows) -> tuple[Floats, ...]:
        """[L] of every sample of the rank: the policy's log-probability of each token; 0 for the first."""
        flat = self._logprobs(self.policy, batch, rows, only_masked=False).cpu().numpy()
        return tuple(np.split(flat, rows.offsets[1:-1])) if rows.num_samples else ()

    @torch.no_grad()
    def _logprobs(self, model: Policy, batch: RankBatch, rows: Rows, *, only_masked: bool) -> Tensor:
        result = torch.zeros(len(rows.token_ids), device=self.ranks.device)
        try:
            for step in batch.steps:
                for microbatch in microbatches(batch, rows, step, self.ranks.device, only_masked=only_masked):
                    result[microbatch.token_index] = model(microbatch).logprobs
        finally:
            reshard(model)
        return result

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """All optimizer steps of a batch; metrics of each, the same on every rank."""
        advantages = compute_advantages(
            self.algorithm, batch, rows, scores, all_reduce=self.ranks.all_reduce, device=self.ranks.device
        )
        return tuple(self._step(batch, rows, scores, advantages, index) for index in range(len(batch.steps)))

    def _step(
        self, batch: RankBatch, rows: Rows, scores: RoleScores, advantages: Tensor, index: int
    ) -> dict[str, float]:
        weights = step_weights(self.algorithm, batch, index, device=self.ranks.device)
        metrics = StepMetrics()
        for microbatch in microbatches(batch, rows, batch.steps[index], self.ranks.device):
            output = self.policy(microbatch, with_entropy=True, entropy_grad=self.algorithm.weights_need_entropy())
            inputs = loss_inputs(
                batch, microbatch, output.logprobs, output.entropy, scores=scores, advantages=advantages
            )
            result = microbatch_loss(self.algorithm, inputs, weights[microbatch.table_index])
            result.loss.backward()  # type: ignore[no-untyped-call]
            metrics.add(
                loss=result.loss,
                values=result.values,
                maxima=result.maxima,
                num_tokens=result.num_tokens,
                mismatch=result.mismatch,
            )
        update = self.updater.update()
        return (
            {
                "train/grad_norm": update.norm,
                "train/lr": update.lr,
                "train/skipped": float(not update.taken),
                "train/step": float(self.updater.step),
            }
            | self.ranks.reduce(metrics)
            | compiled_graphs()
        )


def microbatches(
    batch: RankBatch, rows: Rows, step: RankStep, device: torch.device, *, only_masked: bool = True
) -> Iterator[Microbatch]:
    """The rank's microbatches of one optimizer step, on the device."""
    for indices in step.microbatches:
        yield collate(rows, indices, table_index=batch.samples, only_masked=only_masked).to(device)
