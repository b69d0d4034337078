"""Megatron's distributed format (torch's, with its own names and metadata), read and written weight by weight."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.errors import ModelError, some_of
from pydantic import Field

from .layout import MegatronLayout, Weights, latest_iteration, outline_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..weights.placement import TorchDist
    from .outline import Entry, Outline

METADATA, CONFIG, COMMON = ".metadata", "metadata.json", "common.pt"
VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


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
                f"{folder}: the weights do not fit the model in {outline.source}: it has unknown {some_of(surplus)}"
            )
        return _Weights(files, outline)

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        import torch
        from plasmid_convert.distributed_files import DistributedWriter

        if not (path / "config.json").is_file():
            raise ModelError("the source has no config.json, which layout torch_dist needs to derive Megatron's names")
        outline = outline_of(path, multiple=self.vocab_multiple)
        writer = DistributedWriter(path, max_file_bytes=round(self.max_file_gb * 1e9))
        try:
            kept = ((name, tensor) for name, tensor in tensors if not name.startswith(self.leave_out))
            for entry, whole in outline.from_hf(kept):
                parts = whole.chunk(len(entry.places)) if len(entry.places) > 1 else (whole,)
                for place, part in zip(entry.places, parts, strict=True):
                    writer.add(place.key, part.reshape(place.shape), start=place.start, size=place.size)
            for one in outline.others:
                writer.add_object(one.unique_key, [one.data])
            writer.finish()
        finally:
            writer.close()
        torch.save({"checkpoint_version": 3.0}, path / COMMON)
        (path / CONFIG).write_text(json.dumps(VERSIONS), encoding="utf-8")


class _Weights:
    def __init__(self, files: TorchDist, outline: Outline) -> None:
        self._files, self._rows = files, outline.architecture.vocab_size

    def read(self, entry: Entry) -> Tensor:
        return self._files.read(entry.places, rows=self._rows if entry.over_vocabulary else None)
