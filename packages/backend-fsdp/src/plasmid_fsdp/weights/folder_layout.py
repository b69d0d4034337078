"""Mapping between the tensors of a model folder and those of the model, which may be renamed or fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from plasmid_models.folder import tensor_names
from plasmid_models.pieces import Piece, Pieces, pieces_of, present_pieces
from plasmid_models.source import Source
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLayout:
    """Layout of one folder; synced and exported weights keep the folder's names."""

    pieces: Pieces
    """Pieces in the folder of the model's tensors that are not stored in it as they are."""
    known: Pieces
    """All pieces that the model can be loaded from."""
    exact: tuple[str, ...]
    """Substrings of the names of tensors that always stay in fp32, as in engines."""

    @classmethod
    def of(cls, lm: PreTrainedModel, source: Source) -> FolderLayout:
        """Create the layout for a folder of the model ``lm``, sharded or not. Raises `ModelError`."""
        exact = tuple(lm._keep_in_fp32_modules_strict or ())
        return cls(pieces={}, known=pieces_of(lm), exact=exact).of_folder(source)

    def of_folder(self, source: Source) -> FolderLayout:
        """Return the layout of another folder of the same model. Raises `ModelError` if it cannot be read."""
        names = tensor_names(source.where, source.path)
        return FolderLayout(pieces=present_pieces(self.known, names), known=self.known, exact=self.exact)

    def parts(self, name: str) -> tuple[Piece, ...]:
        """Return the pieces in the folder of the model's tensor ``name``."""
        return self.pieces.get(name, (Piece(name),))

    def group_by_dtype(
        self, named: Mapping[str, Tensor], dtype: torch.dtype
    ) -> list[tuple[torch.dtype, dict[str, Tensor]]]:
        """Group the tensors by the dtype in which they are sent and exported, usually ``dtype``."""
        exact = {name: tensor for name, tensor in named.items() if any(part in name for part in self.exact)}
        return [(dtype, {n: t for n, t in named.items() if n not in exact}), (torch.float32, exact)]

    def sizes(self, named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes of every tensor of the folder, in the order of `group_by_dtype`."""
        return {
            part.name: torch.Size(part.shape(tensor.shape)).numel() * itemsize
            for kept, group in self.group_by_dtype(named, dtype)
            for name, tensor in group.items()
            for itemsize in [kept.itemsize if tensor.is_floating_point() else tensor.itemsize]
            for part in self.parts(name)
        }
