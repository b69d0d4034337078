"""Weights of a model folder that are not trained, and go into an exported folder as they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from plasmid_models.folder import is_torch_dist, weight_files
from safetensors import safe_open
from torch import Tensor

from .bridge import Architecture
from .families import prediction_layers


class Untrained:
    """Layers that predict further tokens (MTP), which engines draft with."""

    def __init__(self, architecture: Architecture, path: Path, *, where: str) -> None:
        """Raises `ModelError` if the folder has no weights any more."""
        self._files: dict[str, Path] = {}
        prefixes = prediction_layers(architecture.hf)
        for file in weight_files(where, path) if prefixes and not is_torch_dist(path) else ():
            with safe_open(file, framework="pt") as opened:
                self._files |= {name: file for name in opened.keys() if name.startswith(prefixes)}  # noqa: SIM118

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """One after another, read when it is asked for."""
        for name, file in self._files.items():
            with safe_open(file, framework="pt") as opened:
                yield name, opened.get_tensor(name)
