"""Adapter code shared by all trainers: tensors of a weight sync, and the identity of the base in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from plasmid.errors import CheckpointError, one_line
from plasmid.utils.json_text import read_json
from torch import Tensor

from .backend import RankModel

BASE = "base.json"
"""File in the checkpoint of an adapter that identifies its base."""


def sent_tensors(
    policy: RankModel, mode: Literal["merged", "with_base", "alone"], *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight sync; ``mode`` is `SyncPlan.adapter`."""
    adapter = policy.adapter
    if adapter is None or mode == "merged":
        yield from policy.weights(dtype=dtype, device=device)
        return
    if mode == "with_base":
        with adapter.disable():
            yield from policy.weights(dtype=dtype, device=device)
    yield from adapter.weights(dtype=dtype, device=device)


def check_has_adapter(path: Path, *, saved: bool, expected: bool) -> None:
    """Raise `CheckpointError` if a checkpoint has an adapter and the trainer has none, or the other way round."""
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
