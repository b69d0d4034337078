"""How the tensors of a model's folder lie in the model: under other names, or several of them in one."""

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
    """Of one folder, whose names are kept by what is sent and exported."""

    pieces: Pieces
    """What the folder has of the model's tensors that are no tensors of the folder."""
    known: Pieces
    """The same, of all folders that the model can be loaded from."""
    exact: tuple[str, ...]
    """Parts of names of tensors that stay in fp32, whatever the dtype of the others: engines have them so."""

    @classmethod
    def of(cls, lm: PreTrainedModel, source: Source) -> FolderLayout:
        """How the folder's tensors lie in ``lm``, sharded or not. Raises `ModelError` if it cannot be read."""
        exact = tuple(lm._keep_in_fp32_modules_strict or ())
        return cls(pieces={}, known=pieces_of(lm), exact=exact).of_folder(source)

    def of_folder(self, source: Source) -> FolderLayout:
        """That of another folder of the same model. Raises `ModelError` if it cannot be read."""
        names = tensor_names(source.where, source.path)
        return FolderLayout(pieces=present_pieces(self.known, names), known=self.known, exact=self.exact)

    def parts(self, name: str) -> tuple[Piece, ...]:
        """What the folder has of the model's tensor ``name``."""
        return self.pieces.get(name, (Piece(name),))

    def by_dtype(self, named: Mapping[str, Tensor], dtype: torch.dtype) -> list[tuple[torch.dtype, dict[str, Tensor]]]:
        """The tensors by what they are sent and exported in; most in ``dtype``."""
        exact = {name: tensor for name, tensor in named.items() if any(part in name for part in self.exact)}
        return [(dtype, {n: t for n, t in named.items() if n not in exact}), (torch.float32, exact)]

    def sizes(self, named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
        """Bytes of every tensor of the folder, in the order of `by_dtype`."""
        return {
            part.name: torch.Size(part.shape(tensor.shape)).numel() * itemsize
            for kept, group in self.by_dtype(named, dtype)
            for name, tensor in group.items()
            for itemsize in [kept.itemsize if tensor.is_floating_point() else tensor.itemsize]
            for part in self.parts(name)
        }
