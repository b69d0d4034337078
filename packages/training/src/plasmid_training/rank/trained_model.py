"""A model that is trained: its optimizer steps, with learning rate and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from plasmid.components import Algorithm
from plasmid.types.batch import Rows
from torch import Tensor

from ..batches.collate import Microbatch, collate
from ..batches.rank_batch import RankBatch, RankStep
from ..learning_rate import learning_rate
from ..objective.metrics import StepMetrics
from ..objective.objective import MicrobatchLoss, step_weights
from .backend import RankModel
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


def microbatches(batch: RankBatch, rows: Rows, step: RankStep, *, only_masked: bool = True) -> Iterator[Microbatch]:
    """The rank's microbatches of one optimizer step, on the CPU."""
    for indices in step.microbatches:
        yield collate(rows, indices, table_index=batch.samples, only_masked=only_masked)
