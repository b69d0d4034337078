"""The policy as a Hugging Face folder, written while it is gathered, and as a stream of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from plasmid_models.folder import dtype_of
from plasmid_models.folder_writer import ChangeConfig, FolderWriter
from plasmid_models.source import Source
from torch import Tensor

from .folder_layout import FolderLayout
from .gathering import gathered


def whole_tensors(
    named: Mapping[str, Tensor], layout: FolderLayout, *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its name in the folder, cast to ``dtype`` if it is of floats. All ranks iterate together."""
    for kept, group in layout.by_dtype(named, dtype):
        for name, tensor in gathered(group, dtype=kept):
            whole = tensor.to(device)
            for part in layout.parts(name):
                yield part.name, part.of(whole)


def export_folder(
    target: Path,
    named: Mapping[str, Tensor],
    layout: FolderLayout,
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
    tensors = whole_tensors(named, layout, dtype=dtype, device=torch.device("cpu"))
    try:
        if write:
            writer = FolderWriter(target, source=source.path, tokenizer=tokenizer, change_config=change_config)
            writer.write(tensors, sizes=layout.sizes(named, dtype))
    finally:
        for _ in tensors:  # the other ranks gather to the end, and so must a rank that cannot write
            pass
