"""Weights of a model folder that are not trained, and copied to exported folders unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from plasmid_models.folder import dtype_of, is_torch_dist, open_weights
from plasmid_models.fp8_blocks import BlockSlice
from torch import Tensor

from .bridge import Architecture
from .families import prediction_layers


class UntrainedWeights:
    """Multi-token prediction (MTP) layers, which engines use for speculative decoding."""

    def __init__(self, architecture: Architecture, path: Path, *, where: str) -> None:
        """Raises `ModelError` if the folder has no weights any more."""
        self._where, self._path, self._names = where, path, list[str]()
        prefixes = prediction_layers(architecture.hf)
        if prefixes and not is_torch_dist(path):
            with open_weights(where, path) as found:
                self._names = [name for name in found if name.startswith(prefixes)]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, read lazily; matrices in fp8 are cast to the dtype of the folder's config."""
        if not self._names:
            return
        dtype = getattr(torch, dtype_of(self._where, self._path))
        with open_weights(self._where, self._path) as found:
            for name in self._names:
                tensor: Tensor = found[name][...]
                yield name, tensor.to(dtype) if isinstance(found[name], BlockSlice) else tensor
