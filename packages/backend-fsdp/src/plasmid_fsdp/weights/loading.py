"""Loading of a rank's shards from safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import ModelError
from plasmid_models.folder import find_misfit, open_weights
from plasmid_models.pieces import Piece
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
    """Load the shards of ``named`` from a Hugging Face folder, reading only this rank's rows.

    ``layout`` maps the model's tensors to those of the folder. The files may have additional tensors in ``ignored`` and
    lack tensors in ``optional``; returns the names of those they lack. Raises `ModelError` if names or shapes do not
    match.
    """
    with open_weights(where, path) as found:
        absent = {name for name in optional if name not in found}
        present = {name: tensor for name, tensor in named.items() if name not in absent}
        shapes = {
            part.name: part.shape(tensor.shape) for name, tensor in present.items() for part in layout.parts(name)
        }
        misfit = find_misfit(found, shapes, ignored={*ignored, *filter(_is_derived, found)})
        if misfit:
            raise ModelError(f"{where}.path: the weights in {path} do not fit its model: it {misfit}")
        for name, target in present.items():
            for part in layout.parts(name):
                fill_shard(target, part, found[part.name], shard)
    return absent


def fill_shard(target: Tensor, part: Piece, saved: Any, shard: Shard) -> None:
    """Copy this rank's rows of a tensor of a folder, which can be sliced, into ``target``."""
    if not isinstance(target, DTensor):
        part.of(target).copy_(saved[...])
        return
    place = part.within(shard.rows(target.shape[0]))
    if place is not None:
        index, rows = place
        local(target)[index].copy_(saved[rows])


def _is_derived(name: str) -> bool:
    """Return True for buffers that old checkpoints contain but models compute themselves."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
