"""The critic on one rank: values of its samples, and optimizer steps on them. Knows nothing of processes or files."""

from __future__ import annotations

from collections.abc import Sequence
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
from torch import Tensor, nn

from .build import Network
from .layout import Ranks, on_last_stage
from .optimizer import Updater
from .packing import Packed
from .passes import microbatches, run
from .settings import Megatron


@dataclass(slots=True, kw_only=True, eq=False)
class Critic:
    """One rank's part of the critic and everything that changes it. All ranks call every method together."""

    network: Network
    chunks: Sequence[nn.Module]
    """Those of ``network``, wrapped."""
    updater: Updater
    algorithm: ActorCritic
    ranks: Ranks
    settings: Megatron

    @torch.no_grad()
    def values(self, batch: RankBatch, rows: Rows) -> Tensor:
        """[T] the value of the text before each of the rank's loss tokens; 0 at other tokens."""
        result = torch.zeros(len(rows.token_ids), device=self.ranks.device)

        def keep(packed: Packed, values: Tensor) -> Tensor:
            result[packed.batch.token_index] = values
            return result.new_zeros(())

        for index in range(len(batch.steps)):
            run(self.chunks, self._microbatches(batch, rows, index), keep, train=False)
        return result

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """All optimizer steps of a batch towards the algorithm's returns; metrics of each.

        ``train/explained_variance`` is that of the values before the first step.
        """
        returns = torch.zeros(len(rows.token_ids), device=self.ranks.device)
        of_batch: dict[str, float] = {}
        if on_last_stage():
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

        def loss(packed: Packed, values: Tensor) -> Tensor:
            result = value_microbatch_loss(
                self.algorithm,
                packed.batch,
                values,
                old_values=old_values,
                returns=returns,
                weights=weights[packed.batch.table_index],
            )
            metrics.add(loss=result.loss, values=result.values, maxima=result.maxima, num_tokens=result.num_tokens)
            return result.loss

        run(self.chunks, self._microbatches(batch, rows, index), loss, train=True)
        update = self.updater.update()
        report = {
            "train/critic_grad_norm": update.norm,
            "train/critic_lr": update.lr,
            "train/critic_skipped": float(not update.taken),
        }
        if on_last_stage():
            reduced = self.ranks.reduce(metrics)
            report |= {"train/value_loss": reduced.pop("train/loss")} | reduced
        return report

    def _microbatches(self, batch: RankBatch, rows: Rows, index: int) -> list[Packed]:
        return microbatches(batch, rows, batch.steps[index], self.settings, device=self.ranks.device)
