"""Models that are scored but never trained: the reference and the teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from plasmid_models.folder import differences, read_config
from plasmid_models.source import Source
from plasmid_training.offload import Offloaded
from torch import Tensor, nn

from .bridge import read_architecture
from .build import Network, build_language_model
from .settings import Megatron
from .weights import load_weights, weights

Chunks = Sequence[nn.Module]


class Frozen(Protocol):
    """A model that takes up no GPU memory until it is scored."""

    def ready(self, policy: Chunks) -> AbstractContextManager[Chunks]:
        """What to score with within the context; ``policy`` is the live one, which must not be used meanwhile."""
        ...


class HostWeights:
    """This rank's part of a model of the policy's architecture, kept on the host and swapped into the policy."""

    def __init__(self, policy: Network) -> None:
        """Start as a copy of the live weights."""
        self._kept = [_host_copy(weight.tensor.detach()) for weight in weights(policy.bare)]

    @contextmanager
    def ready(self, policy: Chunks) -> Iterator[Chunks]:
        """Exchange the live weights for these within the context; afterwards both are what they were, bit by bit."""
        self._swap(policy)
        try:
            yield policy
        finally:
            self._swap(policy)

    def fill(self, policy: Network, source: Source) -> None:
        """Load another folder, by way of the live weights, which are put back. Raises `ModelError`."""
        live = [weight.tensor for weight in weights(policy.bare)]
        saved = [tensor.detach().clone() for tensor in live]
        try:
            load_weights(policy.bare, policy.architecture, source.path, where=source.where)
            for kept, tensor in zip(self._kept, live, strict=True):
                kept.copy_(tensor.detach())
        finally:
            with torch.no_grad():
                for tensor, before in zip(live, saved, strict=True):
                    tensor.copy_(before)

    @torch.no_grad()
    def _swap(self, policy: Chunks) -> None:
        for weight, kept in zip(weights([_bare(chunk) for chunk in policy]), self._kept, strict=True):
            was_live = weight.tensor.detach().clone()
            weight.tensor.copy_(kept)
            kept.copy_(was_live)


class SecondModel:
    """A model of another architecture: laid out like the policy, kept on the host and moved to the GPU to be scored."""

    def __init__(self, network: Network) -> None:
        self._network, self._offloaded = network, Offloaded()
        self._leave()

    @contextmanager
    def ready(self, policy: Chunks) -> Iterator[Chunks]:
        """The model, on its device within the context."""
        self._offloaded.back()
        try:
            yield self._network.bare
        finally:
            self._leave()

    def _leave(self) -> None:
        self._offloaded.out(tensor for chunk in self._network.bare for tensor in chunk.parameters())


def load_frozen(source: Source, policy: Network, *, policy_path: Path, settings: Megatron) -> Frozen:
    """The folder's weights, in the policy's own module if its architecture is the same, else in a second one.

    Call it before the policy has changed. Raises `ModelError`.
    """
    if differences(read_config("model", policy_path), read_config(source.where, source.path)):
        return SecondModel(build_language_model(source, read_architecture(source, settings), settings))
    kept = HostWeights(policy)
    if source.path.resolve() != policy_path.resolve():
        kept.fill(policy, source)
    return kept


def _bare(chunk: nn.Module) -> nn.Module:
    """Without the wrapper that sums gradients."""
    return chunk.module if hasattr(chunk, "ddp_config") else chunk  # type: ignore[return-value]


def _host_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)
