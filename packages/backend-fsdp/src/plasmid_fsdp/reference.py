"""A second set of weights for the policy's own model, kept on the host and swapped in when it is needed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from plasmid.errors import ModelError
from torch import Tensor, nn
from transformers import PreTrainedModel

from .folder import differences, read_config
from .launch import Shard
from .model import reshard
from .weights import aliases, load_weights, local, named_weights


class HostWeights:
    """This rank's shards of another model of the policy's architecture (the reference), without a copy on the GPU."""

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        """Start as a copy of ``named``, the live weights."""
        pinned = any(tensor.is_cuda for tensor in named.values())
        self.shards = {name: _host_copy(local(tensor.detach()), pinned) for name, tensor in named.items()}

    @contextmanager
    def swapped_in(self, policy: nn.Module, named: Mapping[str, Tensor]) -> Iterator[None]:
        """Exchange the live weights for these within the context; afterwards both are what they were, bit by bit."""
        self._swap(policy, named)
        try:
            yield
        finally:
            self._swap(policy, named)

    def fill(self, named: Mapping[str, Tensor], path: Path, *, shard: Shard, ignored: Collection[str]) -> None:
        """Load another folder, by way of ``named``, the live weights, which are put back. Raises `ModelError`."""
        saved = {name: local(tensor.detach()).clone() for name, tensor in named.items()}
        try:
            load_weights(named, path, where="reference", shard=shard, ignored=ignored)
            for name, tensor in named.items():
                self.shards[name].copy_(local(tensor.detach()))
        finally:
            with torch.no_grad():
                for name, tensor in named.items():
                    local(tensor).copy_(saved[name])

    @torch.no_grad()
    def _swap(self, policy: nn.Module, named: Mapping[str, Tensor]) -> None:
        reshard(policy)
        for name, tensor in named.items():
            live, kept = local(tensor), self.shards[name]
            was_live = live.clone()
            live.copy_(kept)
            kept.copy_(was_live)


def _host_copy(tensor: Tensor, pinned: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)


def load_reference(lm: PreTrainedModel, *, policy_path: Path, path: Path, shard: Shard) -> HostWeights:
    """The reference's weights: what the policy starts from, or another folder of the same architecture.

    Call it before the policy has changed. Raises `ModelError`.
    """
    weights = HostWeights(named_weights(lm))
    if path.resolve() == policy_path.resolve():
        return weights
    different = differences(read_config("model", policy_path), read_config("reference", path))
    if different:
        raise ModelError(
            f"reference.path: {path} has another architecture than the policy ({different[0]}); "
            "the two must differ in their weights alone"
        )
    named = named_weights(lm)
    weights.fill(named, path, shard=shard, ignored=aliases(lm))
    return weights
