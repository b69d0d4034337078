"""The critic on one rank: values of its samples, and optimizer steps on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from plasmid.components import ActorCritic
from plasmid.types import Role
from plasmid.types.batch import Rows
from torch import Tensor

from ..batches.collate import Microbatch
from ..batches.rank_batch import RankBatch
from ..critic import compute_returns, explained_variance, value_microbatch_loss
from ..objective.objective import MicrobatchLoss, RoleScores
from .peers import PeerRanks
from .trained_model import TrainedModel, microbatches


@dataclass(slots=True, kw_only=True, eq=False)
class Critic:
    """One rank's critic. All ranks call every method together."""

    trained: TrainedModel
    algorithm: ActorCritic
    peers: PeerRanks

    @torch.no_grad()
    def values(self, batch: RankBatch, rows: Rows) -> Tensor:
        """[T] the value of the text before each of the rank's loss tokens; 0 at other tokens."""
        result = torch.zeros(len(rows.token_ids), device=self.peers.device)

        def keep(microbatch: Microbatch, values: Tensor) -> Tensor:
            result[microbatch.token_index] = values
            return result.new_zeros(())

        for step in batch.steps:
            self.trained.model.run(microbatches(batch, rows, step), keep, train=False)
        return result

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
