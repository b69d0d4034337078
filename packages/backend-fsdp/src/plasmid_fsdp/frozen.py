"""Models that are scored but never trained: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from plasmid_models.folder import differences, read_config
from plasmid_models.source import Source
from torch import Tensor

from .folder_layout import FolderLayout
from .launch import Shard
from .loading import reshard
from .model import Policy, build_policy
from .settings import FSDP
from .weights import aliases, load_weights, local, named_weights


class Frozen(Protocol):
    """A model that takes up no GPU memory until it is scored."""

    def ready(self, policy: Policy) -> AbstractContextManager[Policy]:
        """What to score with within the context; ``policy`` is the live one, which must not be used meanwhile."""
        ...


class HostWeights:
    """This rank's shards of a model of the policy's architecture, kept on the host and swapped into the policy."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        """Start as a copy of ``named``, the live weights."""
        pinned = any(tensor.is_cuda for tensor in named.values())
        self.shards = {name: _host_copy(local(tensor.detach()), pinned) for name, tensor in named.items()}

    @contextmanager
    def ready(self, policy: Policy) -> Iterator[Policy]:
        """Exchange the live weights for these within the context; afterwards both are what they were, bit by bit."""
        self._swap(policy)
        try:
            yield policy
        finally:
            self._swap(policy)

    def fill(
        self,
        named: Mapping[str, Tensor],
        source: Source,
        *,
        layout: FolderLayout,
        shard: Shard,
        ignored: Collection[str],
    ) -> None:
        """Load another folder, by way of ``named``, the live weights, which are put back. Raises `ModelError`."""
        saved = {name: local(tensor.detach()).clone() for name, tensor in named.items()}
        try:
            load_weights(named, source.path, where=source.where, shard=shard, layout=layout, ignored=ignored)
            for name, tensor in named.items():
                self.shards[name].copy_(local(tensor.detach()))
        finally:
            with torch.no_grad():
                for name, tensor in named.items():
                    local(tensor).copy_(saved[name])

    @torch.no_grad()
    def _swap(self, policy: Policy) -> None:
        reshard(policy)
        for name, tensor in named_weights(policy.lm).items():
            live, kept = local(tensor), self.shards[name]
            was_live = live.clone()
            live.copy_(kept)
            kept.copy_(was_live)


class SecondModel:
    """A model of another architecture: sharded like the policy, kept on the host and moved to the GPU to be scored."""

    def __init__(self, model: Policy, *, device: torch.device, moves: bool) -> None:
        """``moves`` is False where the model is on the host anyway and computes from there."""
        self._model, self._device, self._moves = model, device, moves
        self._move(torch.device("cpu"))

    @contextmanager
    def ready(self, policy: Policy) -> Iterator[Policy]:
        """The model, on its device within the context."""
        self._move(self._device)
        try:
            yield self._model
        finally:
            reshard(self._model)
            self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        if self._moves:
            self._model.to(device)


def load_frozen(
    source: Source, policy: Policy, *, policy_path: Path, settings: FSDP, device: torch.device, shard: Shard
) -> Frozen:
    """The folder's weights, in the policy's own module if its architecture is the same, else in a second one.

    Call it before the policy has changed. Raises `ModelError`.
    """
    if differences(read_config("model", policy_path), read_config(source.where, source.path)):
        model = build_policy(settings, source, device=device, shard=shard, trained=False)
        return SecondModel(model, device=device, moves=device.type == "cuda" and not settings.cpu_offload)
    named = named_weights(policy.lm)
    weights = HostWeights(named)
    if source.path.resolve() != policy_path.resolve():
        layout = FolderLayout.of(policy.lm, source)
        weights.fill(named, source, layout=layout, shard=shard, ignored=aliases(policy.lm))
    return weights


def _host_copy(tensor: Tensor, pinned: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)
