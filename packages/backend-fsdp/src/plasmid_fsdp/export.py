"""The policy as a Hugging Face folder, written while it is gathered, and as a stream of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from plasmid.training.folder_writer import ChangeConfig, FolderWriter
from plasmid.training.model_folder import dtype_of
from plasmid.training.model_source import Source
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole_tensors(
    named: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every weight, gathered one at a time; floats are cast first, so that less is sent. All ranks iterate together."""
    for name, tensor in named.items():
        cast = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        yield name, (cast.full_tensor() if isinstance(cast, DTensor) else cast).to(device)


def export_folder(
    target: Path,
    named: Mapping[str, Tensor],
    *,
    source: Source,
    tokenizer: Path,
    write: bool,
    change_config: ChangeConfig | None = None,
) -> None:
    """Gather all weights in the dtype of the source's config; the rank that shall ``write`` makes a folder of them.

    All ranks call it together. Raises `CheckpointError`.
    """
    dtype: torch.dtype = getattr(torch, dtype_of(source.where, source.path))
    tensors = whole_tensors(named, dtype=dtype, device=torch.device("cpu"))
    try:
        if write:
            sizes = {
                name: t.numel() * (dtype.itemsize if t.is_floating_point() else t.itemsize) for name, t in named.items()
            }
            writer = FolderWriter(target, source=source.path, tokenizer=tokenizer, change_config=change_config)
            writer.write(tensors, sizes=sizes)
    finally:
        for _ in tensors:  # the other ranks gather to the end, and so must a rank that cannot write
            pass
