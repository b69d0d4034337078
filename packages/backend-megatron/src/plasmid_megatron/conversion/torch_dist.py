"""Megatron's distributed format (torch's, with its own names and metadata), read and written weight by weight."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.errors import ModelError, abbreviate
from plasmid_convert.companions import read_config
from plasmid_models.text_model import has_vision
from pydantic import Field

from .layout import MegatronLayout, Weights, latest_iteration, outline_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..weights.placement import TorchDist
    from .opened import TorchDistParts
    from .outline import Entry, Outline

METADATA, CONFIG = ".metadata", "metadata.json"


class TorchDistFolder(MegatronLayout):
    """Megatron's distributed format, as trainer 'megatron' writes it: a run's batch-000010, or a folder of weights."""

    kind: Literal["torch_dist"] = "torch_dist"
    vocab_multiple: int = Field(1, ge=1)
    """Pad the vocabulary with zeros to a multiple of this when writing."""
    leave_out: tuple[str, ...] = ()
    """Prefixes of the names of tensors not to write, such as those of multi-token prediction layers."""
    max_file_gb: float = Field(5.0, gt=0)
    """Maximum size of a file, in units of 10^9 bytes; a larger tensor gets its own file."""

    def folder_of(self, path: Path) -> Path | None:
        folders = (path, path / "trainer", latest_iteration(path))
        return next((f for f in folders if (f / METADATA).is_file() and (f / CONFIG).is_file()), None)

    def open_weights(self, folder: Path, outline: Outline) -> Weights:
        from ..weights.placement import TorchDist

        files = TorchDist(folder, f"{folder}: the weights do not fit the model in {outline.source}: it")
        if files.has_adapter:
            raise ModelError(
                f"{folder}: contains an adapter instead of model weights; rl export merges the adapter of a run"
            )
        known = {place.key for entry in outline.entries for place in entry.places}
        surplus = sorted(files.names - known)
        if surplus:
            raise ModelError(
                f"{folder}: the weights do not fit the model in {outline.source}: it has unknown {abbreviate(surplus)}"
            )
        return _Weights(files, outline)

    def open_parts(self, path: Path) -> TorchDistParts:
        if not (path / "config.json").is_file():
            raise ModelError("the source has no config.json, which layout torch_dist needs to derive Megatron's names")
        if has_vision(read_config(path / "config.json")):
            raise ModelError(
                "the source has a vision model, whose weights layout torch_dist does not contain; trainer 'megatron' "
                "reads the Hugging Face folder"
            )
        outline = outline_of(path, multiple=self.vocab_multiple)
        from .opened import TorchDistParts  # after Megatron was imported without its warnings

        limit = round(self.max_file_gb * 1e9)
        return TorchDistParts(path, outline, leave_out=self.leave_out, max_bytes=limit)

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.open_parts(path).write_stream(tensors)


class _Weights:
    def __init__(self, files: TorchDist, outline: Outline) -> None:
        self._files, self._rows = files, outline.architecture.vocab_size

    def read(self, entry: Entry) -> Tensor:
        return self._files.read(entry.places, rows=self._rows if entry.over_vocabulary else None)

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._files.dtype(entry.places[0])
