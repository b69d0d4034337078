"""The critic on one rank: values of its samples, and optimizer steps on them. Knows nothing of processes or files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from plasmid.components import ActorCritic
from plasmid.types import Role
from plasmid.types.batch import Rows
from plasmid_training.batches.rank_batch import RankBatch
from plasmid_training.critic import compute_returns, explained_variance, value_microbatch_loss
from plasmid_training.objective.actor_critic import StepReports
from plasmid_training.objective.metrics import StepMetrics
from plasmid_training.objective.objective import RoleScores, step_weights
from torch import Tensor

from .learner import microbatches
from .loading import reshard
from .optimizer import Updater
from .ranks import Ranks
from .value_model import ValueModel


@dataclass(slots=True, kw_only=True, eq=False)
class Critic:
    """One rank's critic and everything that changes it. All ranks call every method together."""

    model: ValueModel
    updater: Updater
    algorithm: ActorCritic
    ranks: Ranks

    @torch.no_grad()
    def values(self, batch: RankBatch, rows: Rows) -> Tensor:
        """[T] the value of the text before each of the rank's loss tokens; 0 at other tokens."""
        result = torch.zeros(len(rows.token_ids), device=self.ranks.device)
        try:
            for step in batch.steps:
                for microbatch in microbatches(batch, rows, step, self.ranks.device):
                    result[microbatch.token_index] = self.model(microbatch)
        finally:
            reshard(self.model)
        return result

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """All optimizer steps of a batch towards the algorithm's returns; metrics of each, the same on every rank.

        ``train/explained_variance`` is that of the values before the first step.
        """
        all_reduce, device = self.ranks.all_reduce, self.ranks.device
        returns = compute_returns(self.algorithm, batch, rows, scores, all_reduce=all_reduce, device=device)
        seen = torch.from_numpy(rows.loss_mask).to(device)
        explained = explained_variance(scores[Role.CRITIC][seen], returns[seen], all_reduce)
        of_batch = {} if explained is None else {"train/explained_variance": explained}
        steps = range(len(batch.steps))
        return tuple(self._step(batch, rows, scores[Role.CRITIC], returns, index) | of_batch for index in steps)

    def _step(self, batch: RankBatch, rows: Rows, old_values: Tensor, returns: Tensor, index: int) -> dict[str, float]:
        weights = step_weights(self.algorithm, batch, index, device=self.ranks.device)
        metrics = StepMetrics()
        for microbatch in microbatches(batch, rows, batch.steps[index], self.ranks.device):
            result = value_microbatch_loss(
                self.algorithm,
                microbatch,
                self.model(microbatch),
                old_values=old_values,
                returns=returns,
                weights=weights[microbatch.table_index],
            )
            result.loss.backward()  # type: ignore[no-untyped-call]
            metrics.add(loss=result.loss, values=result.values, maxima=result.maxima, num_tokens=result.num_tokens)
        update = self.updater.update()
        reduced = self.ranks.reduce(metrics)
        return {
            "train/critic_grad_norm": update.norm,
            "train/critic_lr": update.lr,
            "train/critic_skipped": float(not update.taken),
            "train/value_loss": reduced.pop("train/loss"),
        } | reduced
