"""A module sharded with FSDP2, or whole on a single rank. Implements `plasmid_training.rank.backend.RankModel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.batches.collate import Microbatch
from plasmid_training.batches.peers import PeerRanks
from plasmid_training.offload import OffloadedMemory
from plasmid_training.rank.backend import Consume
from torch import Tensor

from ..optimizer import ShardedOptimizer
from ..settings import OptimizerSettings
from ..weights.gathering import EMPTY, gatherables, whole_tensors
from ..weights.shards import Shard, local
from .adapter import ShardedAdapter
from .building import is_sharded, reshard
from .compute_copies import ComputeCopies
from .policy import Policy
from .value_model import ValueModel


class ShardedModel:
    """One rank's shards of a policy or a critic."""

    optimizer: ShardedOptimizer
    """Set for trained models."""

    fuses_loss = True

    def __init__(
        self,
        module: Policy | ValueModel,
        learning: OptimizerSettings,
        *,
        ranks: PeerRanks,
        shard: Shard,
    ) -> None:
        self.module, self.learning = module, learning
        self._ranks, self._shard = ranks, shard
        self._copies: ComputeCopies | None = None
        if not is_sharded(module):
            keep = ranks.device.type == "cpu"
            self._copies = ComputeCopies(module, module.compute_dtype, exact=module.exact_modules, keep=keep)

    @property
    def adapter(self) -> ShardedAdapter | None:
        return self.module.adapter

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint by name: all weights, or only those of the adapter."""
        return self.module.named_tensors() if self.adapter is None else self.adapter.named_tensors()

    def make_optimizer(self) -> ShardedOptimizer:
        parameters = list(self.module.parameters())
        self.optimizer = ShardedOptimizer(
            self.learning, parameters, ranks=self._ranks, num_copies=self._shard.num_copies
        )
        return self.optimizer

    def run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: Any) -> None:
        with nullcontext() if self._copies is None else self._copies.use():
            self._run(microbatches, consume, train=train, **options)

    def _run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: Any) -> None:
        try:
            for microbatch in microbatches:
                on_device = microbatch.to(self._ranks.device)
                loss = consume(on_device, self.module(on_device, **options))
                if train:
                    loss.backward()  # type: ignore[no-untyped-call]
        finally:
            if not train:
                reshard(self.module)

    def shards(self) -> Sequence[Tensor]:
        reshard(self.module)
        return [local(tensor) for tensor in self.module.named_tensors().values()]

    def load(self, source: Source) -> None:
        self.module.load(source, self._shard)

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        changes = self._changes(device)
        yield from whole_tensors(
            self._sync_tensors(dtype), self.module.layout, dtype=dtype, device=device, changes=changes
        )

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        return gatherables(self.module.named_tensors(), self.module.layout, dtype)

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        named, layout, changes = self._sync_tensors(dtype), self.module.layout, self._changes(device)
        for owners in rounds:
            yield list(whole_tensors(named, layout, dtype=dtype, device=device, changes=changes, owners=owners))

    def _sync_tensors(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Return all weights, with their compute copies for those that are sent in their dtype."""
        named = self.module.named_tensors()
        if self._copies is None:
            return named
        (_, sent_in_dtype), *_ = self.module.layout.group_by_dtype(named, dtype)
        return named | self._copies.replace(sent_in_dtype, dtype)

    def _changes(self, device: torch.device) -> Mapping[str, Callable[[Tensor], Tensor]]:
        return self.adapter.layer_merges(device) if self.adapter is not None and self.adapter.is_on else EMPTY

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        return self.module.layout.sizes(self.module.named_tensors(), dtype)

    def offload(self, memory: OffloadedMemory) -> None:
        memory.move_out(self._state())

    def _state(self) -> Iterator[Tensor]:
        yield from (local(tensor) for tensor in (*self.module.parameters(), *self.module.buffers()))
        if hasattr(self, "optimizer"):
            yield from self.optimizer.state()
