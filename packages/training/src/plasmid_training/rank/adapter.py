"""Adapter code shared by all trainers: tensors of a weight sync, and the identity of the base in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from plasmid.errors import CheckpointError, one_line
from plasmid.utils.json_text import read_json
from plasmid_models.sync import Round, divide
from torch import Tensor

from .backend import RankModel, ShareSource

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


def divided_tensors(
    policy: RankModel,
    mode: Literal["merged", "with_base", "alone"],
    *,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int,
) -> tuple[list[Round], Iterator[list[tuple[str, Tensor]]]]:
    """Return the rounds of a weight sync that all ranks divide among them, and this rank's tensors in each round."""
    adapter = policy.adapter
    sources: list[tuple[ShareSource, AbstractContextManager[None]]] = []
    if adapter is None or mode == "merged":
        sources.append((policy, nullcontext()))
    else:
        sources += [(policy, adapter.disable())] if mode == "with_base" else []
        sources.append((adapter, nullcontext()))
    rounds = [divide(source.gatherables(dtype), bucket_bytes=bucket_bytes) for source, _ in sources]

    def tensors() -> Iterator[list[tuple[str, Tensor]]]:
        for (source, context), own in zip(sources, rounds, strict=True):
            with context:
                yield from source.shares(own, dtype=dtype, device=device)

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
