"""One rank of trainer ``bigram``: `RankModel`, `RankOptimizer` and `RankBackend` of `plasmid_training.rank.backend`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError, ModelError
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.batches.collate import Microbatch
from plasmid_training.batches.peers import PeerRanks
from plasmid_training.head.logprobs import token_logprobs
from plasmid_training.offload import OffloadedMemory
from plasmid_training.rank.backend import Consume, Update
from torch import Tensor

from .model import NAME, read_weight
from .plugin import BigramTrainerConfig


class BigramModel:
    """The table, whole on every rank."""

    adapter = None
    fuses_loss = False

    def __init__(self, source: Source, learning: BigramTrainerConfig, ranks: PeerRanks, *, trained: bool) -> None:
        self.learning, self._ranks = learning, ranks
        self.weight = read_weight(source.where, source.path).float().to(ranks.device).requires_grad_(trained)
        self._dtype = getattr(torch, learning.dtype)

    def make_optimizer(self) -> BigramOptimizer:
        return BigramOptimizer(self.weight, max_norm=self.learning.max_grad_norm)

    def run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: Any) -> None:
        weight = self.weight.detach().to(self._dtype).float()  # rounded as in the engine
        total = torch.zeros_like(self.weight)
        for microbatch in microbatches:
            batch = microbatch.to(self._ranks.device)
            table = weight.clone().requires_grad_(train)
            # the shared head computes temperature, kept sets, entropy and top tokens
            one_hot = torch.nn.functional.one_hot(batch.token_ids[batch.source], len(table)).float()
            scores = token_logprobs(
                one_hot,
                table.T,
                batch.targets,
                batch.temperatures,
                kept=batch.kept,
                top_ids=batch.teacher_top_ids,
                **options,
            )
            loss = consume(batch, scores)
            if train:
                loss.backward()
                total += table.grad
        if train:
            self.weight.grad = self._ranks.all_reduce(total)

    def shards(self) -> Sequence[Tensor]:
        return [self.weight.detach()]

    def load(self, source: Source) -> None:
        new = read_weight(source.where, source.path)
        if new.shape != self.weight.shape:
            raise ModelError(f"{source.where}.path: {source.path} has another vocabulary than the policy")
        self.weight.detach().copy_(new)

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        yield NAME, self.weight.detach().to(device, dtype)

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        return {NAME: self.weight.numel() * dtype.itemsize}

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        ranks = tuple(range(self._ranks.num_ranks))
        return [Gatherable(key=name, num_bytes=size, ranks=ranks) for name, size in self.sizes(dtype).items()]

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        for owners in rounds:
            named = self.weights(dtype=dtype, device=device)
            yield [(name, tensor) for name, tensor in named if owners.get(name) == self._ranks.rank]

    def offload(self, memory: OffloadedMemory) -> None:
        memory.move_out(self.shards())


class BigramOptimizer:
    """SGD. All ranks have the same gradient and take the same step."""

    def __init__(self, weight: Tensor, *, max_norm: float) -> None:
        self._weight, self._max_norm = weight, max_norm

    def step(self, lr: float) -> Update:
        assert self._weight.grad is not None, "`BigramModel.run` computes it"
        norm = float(self._weight.grad.norm())
        taken = math.isfinite(norm)
        if taken:
            factor = min(1.0, self._max_norm / norm) if norm and self._max_norm else 1.0
            self._weight.detach().sub_(self._weight.grad, alpha=lr * factor)
        self._weight.grad = None
        return Update(norm, taken)


class BigramBackend:
    """One rank. All ranks call every method together."""

    def __init__(self, config: RunConfig, device: str) -> None:
        assert isinstance(config.trainer, BigramTrainerConfig), "built by another trainer's settings"
        self._settings, self._device = config.trainer, torch.device(device)
        self._policy: BigramModel | None = None

    def open(self) -> PeerRanks:
        self._ranks = PeerRanks(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=self._device)
        return self._ranks

    def build_policy(self, source: Source) -> BigramModel:
        self._policy = BigramModel(source, self._settings, self._ranks, trained=True)
        return self._policy

    def build_critic(self, source: Source) -> BigramModel:
        raise ModelError("trainer 'bigram' has no critic")

    def build_frozen(self, source: Source) -> BigramModel:
        return BigramModel(source, self._settings, self._ranks, trained=False)

    def step_metrics(self) -> dict[str, float]:
        return {}

    def save(self, path: Path, steps: Mapping[str, int]) -> None:
        """Write everything on the first rank: SGD has no state, and sampling happens in the engine."""
        assert self._policy is not None, "built before it is saved"
        if self._ranks.rank == 0:
            path.mkdir(parents=True, exist_ok=True)
            torch.save({"weight": self._policy.weight.detach(), "steps": dict(steps)}, path / "bigram.pt")
        dist.barrier()

    def load(self, path: Path, roles: Collection[str]) -> Mapping[str, int]:
        assert self._policy is not None, "built before it is loaded"
        try:
            state = torch.load(path / "bigram.pt", weights_only=True)
            self._policy.weight.detach().copy_(state["weight"])
            return {role: int(state["steps"][role]) for role in roles}
        except (OSError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path}: cannot be loaded by trainer 'bigram': {error}") from None

    def close(self) -> None:
        self._policy = None


def make_backend(config: RunConfig, device: str) -> BigramBackend:
    """Create the backend of one rank, in the rank's process."""
    return BigramBackend(config, device)
