"""What one rank computes: scores of its samples, and optimizer steps on them. Knows nothing of processes or files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from plasmid.batch import Rows
from plasmid.components import Algorithm
from plasmid.training.collate import Microbatch, collate
from plasmid.training.metrics import StepMetrics
from plasmid.training.objective import compute_advantages, loss_inputs, microbatch_loss, step_weights
from plasmid.training.rank_batch import RankBatch, RankStep
from plasmid.types import Floats, Role
from torch import Tensor, nn
from torch.optim import Optimizer

from .launch import Shard
from .learning_rate import learning_rate
from .model import Policy, reshard
from .optimizer import grad_norm, guarded_step
from .reference import HostWeights
from .settings import FSDP
from .weights import named_weights

Scores = dict[Role, Tensor]


@dataclass(slots=True, kw_only=True, eq=False)
class Learner:
    """One rank's policy and everything that changes it. All ranks call every method together."""

    policy: Policy
    optimizer: Optimizer
    settings: FSDP
    algorithm: Algorithm
    shard: Shard
    device: torch.device
    total_steps: int
    reference: HostWeights | None = None
    step: int = 0
    """Optimizer steps since the start of the run, those that were skipped included."""

    def score(self, batch: RankBatch, rows: Rows, roles: Sequence[Role]) -> Scores:
        """[T] log-probabilities of the rank's loss tokens by role; 0 at other tokens."""
        return {role: self._score(batch, rows, role) for role in roles}

    def _score(self, batch: RankBatch, rows: Rows, role: Role) -> Tensor:
        if role is Role.POLICY:
            return self._logprobs(batch, rows, only_masked=True)
        if role is Role.REFERENCE and self.reference is not None:
            with self.reference.swapped_in(self.policy, named_weights(self.policy.lm)):
                return self._logprobs(batch, rows, only_masked=True)
        raise ValueError(f"this trainer holds no {role.value}")

    def logprobs(self, batch: RankBatch, rows: Rows) -> tuple[Floats, ...]:
        """[L] of every sample of the rank: the policy's log-probability of each token; 0 for the first."""
        flat = self._logprobs(batch, rows, only_masked=False).cpu().numpy()
        return tuple(np.split(flat, rows.offsets[1:-1])) if rows.num_samples else ()

    @torch.no_grad()
    def _logprobs(self, batch: RankBatch, rows: Rows, *, only_masked: bool) -> Tensor:
        result = torch.zeros(len(rows.token_ids), device=self.device)
        try:
            for step in batch.steps:
                for microbatch in self._microbatches(batch, rows, step, only_masked=only_masked):
                    result[microbatch.token_index] = self.policy(microbatch).logprobs
        finally:
            reshard(self.policy)
        return result

    def train(self, batch: RankBatch, rows: Rows, scores: Mapping[Role, Tensor]) -> tuple[dict[str, float], ...]:
        """All optimizer steps of a batch; metrics of each, the same on every rank."""
        advantages = compute_advantages(
            self.algorithm, batch, rows, scores, all_reduce=self.all_reduce, device=self.device
        )
        return tuple(self._step(batch, rows, scores, advantages, index) for index in range(len(batch.steps)))

    def _step(
        self, batch: RankBatch, rows: Rows, scores: Mapping[Role, Tensor], advantages: Tensor, index: int
    ) -> dict[str, float]:
        weights = step_weights(self.algorithm, batch, index, device=self.device)
        metrics = StepMetrics()
        for microbatch in self._microbatches(batch, rows, batch.steps[index], only_masked=True):
            output = self.policy(microbatch, with_entropy=True, entropy_grad=self.algorithm.weights_need_entropy())
            inputs = loss_inputs(microbatch, output.logprobs, output.entropy, scores=scores, advantages=advantages)
            result = microbatch_loss(self.algorithm, inputs, weights[microbatch.table_index])
            result.loss.backward()  # type: ignore[no-untyped-call]
            metrics.add(
                loss=result.loss,
                values=result.values,
                maxima=result.maxima,
                num_tokens=result.num_tokens,
                mismatch=result.mismatch,
            )
        return self._update() | metrics.reduce(self.all_reduce, rank=self.shard.rank, num_ranks=self.shard.num_ranks)

    def _update(self) -> dict[str, float]:
        norm = grad_norm(self.parameters, self.all_reduce, self.device)
        lr = learning_rate(self.settings, step=self.step, total_steps=self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        taken = guarded_step(self.optimizer, self.parameters, norm=norm, max_norm=self.settings.max_grad_norm)
        self.step += 1
        return {
            "train/grad_norm": norm,
            "train/lr": lr,
            "train/skipped": float(not taken),
            "train/step": float(self.step),
        }

    def _microbatches(self, batch: RankBatch, rows: Rows, step: RankStep, *, only_masked: bool) -> Iterator[Microbatch]:
        for indices in step.microbatches:
            yield collate(rows, indices, table_index=batch.samples, only_masked=only_masked).to(self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter once."""
        return list(self.policy.lm.parameters())

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, as a new tensor."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total
