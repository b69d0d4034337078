"""Models that are scored but never trained: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from plasmid_models.folder import describe_differences, read_config
from plasmid_models.source import Source
from torch import Tensor

from ..offload import OffloadedMemory
from .backend import Adapter, RankBackend, RankModel


class FrozenModel(Protocol):
    """A model that uses additional GPU memory only while it is active."""

    def activate(self) -> AbstractContextManager[RankModel]:
        """Yield the model to score with; the policy must not be used within the context."""


class HostWeights:
    """This rank's shards of a model with the policy's architecture, kept on the host and swapped into the policy."""

    def __init__(self, policy: RankModel) -> None:
        """Start as a copy of the live weights."""
        self._policy = policy
        self._copies = [_host_copy(shard.detach()) for shard in policy.shards()]
        self.was_replaced = False
        """True after the first `copy_live`: checkpoints must then contain these weights."""

    @contextmanager
    def activate(self) -> Iterator[RankModel]:
        """Swap these weights into the policy within the context, and back afterwards, bit for bit."""
        self._swap()
        try:
            yield self._policy
        finally:
            self._swap()

    @torch.no_grad()
    def fill(self, source: Source) -> None:
        """Load another folder through the live weights, which are restored. Raises `ModelError`."""
        live = self._policy.shards()
        saved = [shard.clone() for shard in live]
        try:
            self._policy.load(source)
            for copy, shard in zip(self._copies, live, strict=True):
                copy.copy_(shard)
        finally:
            for shard, before in zip(live, saved, strict=True):
                shard.copy_(before)

    @torch.no_grad()
    def copy_live(self) -> None:
        """Replace these weights by the live ones."""
        self.was_replaced = True
        for copy, shard in zip(self._copies, self._policy.shards(), strict=True):
            copy.copy_(shard)

    @torch.no_grad()
    def _swap(self) -> None:
        for live, copy in zip(self._policy.shards(), self._copies, strict=True):
            was_live = live.clone()
            live.copy_(copy)
            copy.copy_(was_live)


class AdapterBase:
    """The base model of a policy with an adapter: the policy with its adapter disabled."""

    def __init__(self, policy: RankModel, adapter: Adapter) -> None:
        self._policy, self._adapter = policy, adapter

    @contextmanager
    def activate(self) -> Iterator[RankModel]:
        """Yield the policy, with its adapter disabled within the context."""
        with self._adapter.disable():
            yield self._policy


class SecondModel:
    """A separate model, kept on the host and moved to the GPU for scoring."""

    def __init__(self, model: RankModel) -> None:
        self._model, self._memory = model, OffloadedMemory()
        model.offload(self._memory)

    @contextmanager
    def activate(self) -> Iterator[RankModel]:
        """Yield the model, which is on its device within the context."""
        self._memory.restore()
        try:
            yield self._model
        finally:
            self._model.offload(self._memory)


def load_frozen(
    backend: RankBackend, source: Source, policy: RankModel, *, policy_path: Path, swap: bool = True
) -> FrozenModel:
    """Load a frozen model. With ``swap``, it shares the policy's module if the architecture is the same.

    With an adapter, the policy's module is shared for the policy's own folder, whose weights it already has, and for no
    other. Call this before the policy is trained. Raises `ModelError`.
    """
    is_own = source.path.resolve() == policy_path.resolve()
    if policy.adapter is not None and is_own:
        return AdapterBase(policy, policy.adapter)
    other = describe_differences(read_config("model", policy_path), read_config(source.where, source.path))
    if policy.adapter is not None or other or not swap:
        return SecondModel(backend.build_frozen(source))
    weights = HostWeights(policy)
    if not is_own:
        weights.fill(source)
    return weights


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
