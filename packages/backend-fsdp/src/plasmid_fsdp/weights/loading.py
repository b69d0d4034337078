"""Fills the shards of a rank from safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import ModelError, some_of
from plasmid_models.folder import weight_files
from plasmid_models.pieces import Piece
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from .folder_layout import FolderLayout
from .shards import Shard, local


@torch.no_grad()
def load_weights(
    named: Mapping[str, Tensor],
    path: Path,
    *,
    where: str,
    shard: Shard,
    layout: FolderLayout,
    ignored: Collection[str] = (),
    optional: Collection[str] = (),
) -> set[str]:
    """Fill the shards of ``named`` from a Hugging Face folder of this layout; only this rank's rows are read.

    Names in ``ignored`` may be in the files as well, those in ``optional`` may be missing from them; what was missing
    is returned. Raises `ModelError` if names or shapes do not fit.
    """
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        try:
            for file in weight_files(where, path):
                opened = stack.enter_context(safe_open(file, framework="pt"))
                found.update((name, opened.get_slice(name)) for name in opened.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None
        absent = {name for name in optional if name not in found}
        present = {name: tensor for name, tensor in named.items() if name not in absent}
        shapes = {
            part.name: part.shape(tensor.shape) for name, tensor in present.items() for part in layout.parts(name)
        }
        _check(shapes, found, path, where, ignored)
        for name, target in present.items():
            for part in layout.parts(name):
                _fill(target, part, found[part.name], shard)
    return absent


def _fill(target: Tensor, part: Piece, saved: Any, shard: Shard) -> None:
    if not isinstance(target, DTensor):
        part.of(target).copy_(saved[...])
        return
    place = part.within(shard.rows(target.shape[0]))
    if place is not None:
        index, rows = place
        local(target)[index].copy_(saved[rows])


def _check(
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, Any],
    path: Path,
    where: str,
    ignored: Collection[str],
) -> None:
    missing = [name for name in wanted if name not in found]
    surplus = [name for name in found if name not in wanted and name not in ignored and not _derived(name)]
    shapes = [
        f"{name} is {list(found[name].get_shape())} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and list(found[name].get_shape()) != list(shape)
    ]
    for what, names in (("lacks", missing), ("has unknown", surplus), ("has other shapes:", shapes)):
        if names:
            raise ModelError(f"{where}.path: the weights in {path} do not fit its model: it {what} {some_of(names)}")


def _derived(name: str) -> bool:
    """True for tables that old checkpoints hold and models compute themselves."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
