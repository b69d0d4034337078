"""Weights of a model folder that are not trained, and copied to exported folders unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plasmid_models.folder import is_torch_dist, weight_files
from safetensors import safe_open
from torch import Tensor

from .bridge import Architecture
from .families import prediction_layers


class UntrainedWeights:
    """Multi-token prediction (MTP) layers, which engines use for speculative decoding."""

    def __init__(self, architecture: Architecture, path: Path, *, where: str) -> None:
        """Raises `ModelError` if the folder has no weights any more."""
        self._files: dict[str, Path] = {}
        prefixes = prediction_layers(architecture.hf)
        for file in weight_files(where, path) if prefixes and not is_torch_dist(path) else ():
            with safe_open(file, framework="pt") as opened:
                self._files |= {name: file for name in opened.keys() if name.startswith(prefixes)}  # noqa: SIM118

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, read lazily."""
        for name, file in self._files.items():
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)
