"""A module sharded by FSDP2 as the rank process uses it. Implements `plasmid_training.rank.backend.RankModel`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from plasmid_models.source import Source
from plasmid_training.batches.collate import Microbatch
from plasmid_training.offload import Offloaded
from plasmid_training.rank.backend import Consume
from plasmid_training.rank.peers import PeerRanks
from torch import Tensor

from ..optimizer import ShardedOptimizer
from ..optimizer_settings import OptimizerSettings
from ..weights.gathering import whole_tensors
from ..weights.shards import Shard, local
from .building import reshard
from .policy import Policy
from .value_model import ValueModel


class ShardedModel:
    """One rank's shards of a policy or a critic."""

    optimizer: ShardedOptimizer
    """Of a model that is trained."""

    def __init__(self, module: Policy | ValueModel, learning: OptimizerSettings, *, peers: PeerRanks) -> None:
        self.module, self.learning = module, learning
        self._peers = peers

    def make_optimizer(self) -> ShardedOptimizer:
        parameters = list(self.module.parameters())
        self.optimizer = ShardedOptimizer(self.learning, parameters, peers=self._peers)
        return self.optimizer

    def run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: bool) -> None:
        try:
            for microbatch in microbatches:
                on_device = microbatch.to(self._peers.device)
                loss = consume(on_device, self.module(on_device, **options))
                if train:
                    loss.backward()  # type: ignore[no-untyped-call]
        finally:
            if not train:
                reshard(self.module)

    def shards(self) -> Sequence[Tensor]:
        reshard(self.module)
        return [local(tensor) for tensor in self.module.named().values()]

    def load(self, source: Source) -> None:
        self.module.load(source, Shard(rank=self._peers.rank, num_ranks=self._peers.num_ranks))

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        return whole_tensors(self.module.named(), self.module.layout, dtype=dtype, device=device)

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        return self.module.layout.sizes(self.module.named(), dtype)

    def untrained(self, source: Source) -> Sequence[Any]:
        return ()

    def offload(self, memory: Offloaded) -> None:
        memory.out(self._state())

    def _state(self) -> Iterator[Tensor]:
        yield from (local(tensor) for tensor in (*self.module.parameters(), *self.module.buffers()))
        if hasattr(self, "optimizer"):
            yield from self.optimizer.state()
