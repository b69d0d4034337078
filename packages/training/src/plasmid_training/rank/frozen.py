"""Models that are scored but never trained: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from plasmid_models.folder import differences, read_config
from plasmid_models.source import Source
from torch import Tensor

from ..offload import Offloaded
from .backend import RankBackend, RankModel


class FrozenModel(Protocol):
    """A model that takes up no GPU memory until it is scored."""

    def ready(self) -> AbstractContextManager[RankModel]:
        """What to score with within the context, in which the policy must not be used."""
        ...


class HostWeights:
    """This rank's part of a model of the policy's architecture, kept on the host and swapped into the policy."""

    def __init__(self, policy: RankModel) -> None:
        """Start as a copy of the live weights."""
        self._policy = policy
        self._kept = [_host_copy(shard.detach()) for shard in policy.shards()]

    @contextmanager
    def ready(self) -> Iterator[RankModel]:
        """Exchange the live weights for these within the context; afterwards both are what they were, bit by bit."""
        self._swap()
        try:
            yield self._policy
        finally:
            self._swap()

    @torch.no_grad()
    def fill(self, source: Source) -> None:
        """Load another folder, by way of the live weights, which are put back. Raises `ModelError`."""
        live = self._policy.shards()
        saved = [shard.clone() for shard in live]
        try:
            self._policy.load(source)
            for kept, shard in zip(self._kept, live, strict=True):
                kept.copy_(shard)
        finally:
            for shard, before in zip(live, saved, strict=True):
                shard.copy_(before)

    @torch.no_grad()
    def _swap(self) -> None:
        for live, kept in zip(self._policy.shards(), self._kept, strict=True):
            was_live = live.clone()
            live.copy_(kept)
            kept.copy_(was_live)


class SecondModel:
    """A model of another architecture, kept on the host and moved to the GPU to be scored."""

    def __init__(self, model: RankModel) -> None:
        self._model, self._memory = model, Offloaded()
        model.offload(self._memory)

    @contextmanager
    def ready(self) -> Iterator[RankModel]:
        """The model, on its device within the context."""
        self._memory.back()
        try:
            yield self._model
        finally:
            self._model.offload(self._memory)


def load_frozen(backend: RankBackend, source: Source, policy: RankModel, *, policy_path: Path) -> FrozenModel:
    """The folder's weights, in the policy's own module if its architecture is the same, else in a second one.

    Call it before the policy has changed. Raises `ModelError`.
    """
    if differences(read_config("model", policy_path), read_config(source.where, source.path)):
        return SecondModel(backend.build_frozen(source))
    kept = HostWeights(policy)
    if source.path.resolve() != policy_path.resolve():
        kept.fill(source)
    return kept


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
