"""Adapter code shared by all trainers: tensors of a weight sync, and the identity of the base in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from plasmid.errors import CheckpointError, one_line
from plasmid.protocols import AdapterSync
from plasmid.utils.json_text import read_json
from plasmid_models.sync import Round, divide
from plasmid_models.text_model import FolderNames
from torch import Tensor

from .backend import RankModel, ShareSource

BASE = "base.json"
"""File in the checkpoint of an adapter that identifies its base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """Weights that one sync of a policy sends. An adapter comes before its base, from which servers keep its layers."""

    policy: RankModel
    names: FolderNames
    """Names of the policy's folder, under which the weights are sent."""
    mode: AdapterSync
    dtype: torch.dtype
    adapter_dtype: torch.dtype
    device: torch.device

    def _sources(self) -> Iterator[tuple[ShareSource, torch.dtype, AbstractContextManager[None]]]:
        """Yield the sources of weights in the order of sending, each with the dtype to send and the context to gather
        in."""
        adapter = self.policy.adapter
        if adapter is None or self.mode == "merged":
            yield self.policy, self.dtype, nullcontext()
            return
        yield adapter, self.adapter_dtype, nullcontext()
        if self.mode == "with_base":
            yield self.policy, self.dtype, adapter.disable()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors."""
        for source, dtype, context in self._sources():
            with context:
                yield from self._rename(source.weights(dtype=dtype, device=self.device))

    def _rename(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((self.names.in_folder(name), tensor) for name, tensor in named)

    def divide(self, bucket_bytes: int) -> tuple[list[Round], Iterator[list[tuple[str, Tensor]]]]:
        """Return the rounds in which all ranks send their shares, and this rank's tensors in each round."""
        sources = list(self._sources())
        rounds = [divide(source.gatherables(dtype), bucket_bytes=bucket_bytes) for source, dtype, _ in sources]

        def tensors() -> Iterator[list[tuple[str, Tensor]]]:
            for (source, dtype, context), own in zip(sources, rounds, strict=True):
                with context:
                    shares = source.shares(own, dtype=dtype, device=self.device)
                    yield from (list(self._rename(share)) for share in shares)

        return [one for own in rounds for one in own], tensors()


def check_has_adapter(path: Path, *, saved: bool, expected: bool) -> None:
    """Raise `CheckpointError` if a checkpoint has an adapter and the trainer has none, or vice versa."""
    if saved != expected:
        has, change = ("an adapter", "set") if saved else ("full weights", "remove")
        raise CheckpointError(f"{path}: the checkpoint has {has}; {change} trainer.lora to resume from it")


def save_base(path: Path, base: Mapping[str, str]) -> None:
    """Write the ``path`` and ``sha256`` of an adapter's base into its checkpoint."""
    (path / BASE).write_text(json.dumps(base), encoding="utf-8")


def check_base(path: Path, base: Mapping[str, str]) -> None:
    """Raise `CheckpointError` if the adapter in the checkpoint was trained on another base model."""
    try:
        saved = read_json(path / BASE)
        is_same = saved["sha256"] == base["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / BASE}: cannot be read: {one_line(error)}") from None
    if not is_same:
        raise CheckpointError(
            f"{path}: the adapter was trained on another base model ({saved.get('path')!r}); the weights in "
            f"model.path = {base['path']!r} differ"
        )
