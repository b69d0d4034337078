"""Weights of a model folder that are not trained, and copied to exported folders unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .folder import dtype_of, is_torch_dist, open_folder, read_config
from .quantized.slices import QuantizedSlice
from .text_model import FolderNames, has_vision, prediction_layers


class UntrainedWeights:
    """Weights of vision models, and of multi-token prediction layers, which engines use for speculative decoding."""

    def __init__(self, path: Path, *, where: str) -> None:
        """Raises `ModelError` if the folder no longer has weights."""
        self._where, self._path, self._names = where, path, list[str]()
        config = read_config(where, path)
        if (has_vision(config) or prediction_layers(config)) and not is_torch_dist(path):
            with open_folder(where, path) as found:
                of_model = FolderNames.of(config, found)
                self._names = [name for name in found if of_model.in_model(name) is None]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, read lazily; quantized ones are cast to the dtype of the folder's config."""
        if not self._names:
            return
        dtype = getattr(torch, dtype_of(self._where, self._path))
        with open_folder(self._where, self._path) as found:
            for name in self._names:
                tensor: Tensor = found[name][...]
                yield name, tensor.to(dtype) if isinstance(found[name], QuantizedSlice) else tensor
