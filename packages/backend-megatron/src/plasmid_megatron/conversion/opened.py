"""Megatron's checkpoints opened for reading by Hugging Face names, and written in parts."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from plasmid.components import TensorInfo
from plasmid_convert.distributed.files import DistributedWriter, write_metadata
from plasmid_convert.parts import pack
from plasmid_convert.safetensors_files import cast, describe
from torch import Tensor

from .layout import Weights
from .outline import Entry, Outline

CONFIG, COMMON = "metadata.json", "common.pt"
VERSIONS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class OpenMegatron:
    """Implements `plasmid.components.OpenCheckpoint`."""

    def __init__(self, outline: Outline, weights: Weights, *, dtype: str | None, of_run: bool) -> None:
        """Cast floating-point weights to ``dtype``.

        With ``of_run`` or a vision model, add the weights of the model's folder that runs do not train.
        """
        self._outline, self._weights, self._dtype = outline, weights, dtype
        self._has_others = of_run or outline.names.has_vision
        self.tensors: list[TensorInfo] = [info for entry in outline.entries for info in self._describe(entry)]
        if self._has_others:
            self.tensors += [describe(name, t.dtype, t.shape) for name, t in outline.untrained_tensors()]

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for entry in self._outline.entries:
            if any(name in names for name in entry.names):
                for name, tensor in self._convert(entry, self._weights.read(entry)):
                    if name in names:
                        yield name, tensor
        if self._has_others:
            yield from ((name, tensor) for name, tensor in self._outline.untrained_tensors() if name in names)

    def _describe(self, entry: Entry) -> Iterator[TensorInfo]:
        whole = torch.empty(entry.weight.tensor.shape, dtype=self._weights.dtype(entry), device="meta")
        for name, tensor in self._convert(entry, whole):
            yield describe(name, tensor.dtype, tensor.shape)

    def _convert(self, entry: Entry, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._outline.to_hf(entry, whole):
            yield name, tensor if entry.is_correction else cast(tensor, self._dtype)


class TorchDistParts:
    """Writes the distributed format, with separate files for each part. Implements `plasmid.components.PartWriter`."""

    def __init__(self, folder: Path, outline: Outline, *, leave_out: tuple[str, ...], max_bytes: int) -> None:
        """``leave_out``: prefixes of the names of tensors that are not written."""
        self._folder, self._outline, self._leave_out, self._max_bytes = folder, outline, leave_out, max_bytes

    def plan(self, tensors: Sequence[TensorInfo]) -> Sequence[Sequence[TensorInfo]]:
        kept = {info.name: info for info in tensors if not info.name.startswith(self._leave_out)}
        entries = self._outline.entries_of(kept)
        return pack([[kept[name] for name in entry.names] for entry in entries], self._max_bytes)

    def write(
        self, number: int, count: int, part: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]
    ) -> Mapping[str, Any]:
        wanted = {info.name for info in part}
        with closing(DistributedWriter(self._folder, max_file_bytes=self._max_bytes, part=number)) as writer:
            self._add(writer, [entry for entry in self._outline.entries if entry.names[0] in wanted], tensors)
            return writer.record()

    def _add(self, writer: DistributedWriter, entries: Sequence[Entry], tensors: Iterable[tuple[str, Tensor]]) -> None:
        for entry, whole in self._outline.from_hf(tensors, entries):
            parts = whole.chunk(len(entry.places)) if len(entry.places) > 1 else (whole,)
            for place, piece in zip(entry.places, parts, strict=True):
                writer.add(place.key, piece.reshape(place.shape), start=place.start, size=place.size)

    def write_stream(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write all tensors, in any order and number, as one part, and complete the folder."""
        kept = ((name, tensor) for name, tensor in tensors if not name.startswith(self._leave_out))
        with closing(DistributedWriter(self._folder, max_file_bytes=self._max_bytes)) as writer:
            self._add(writer, self._outline.entries, kept)
            self.join([writer.record()])

    def join(self, parts: Sequence[Mapping[str, Any]]) -> None:
        with closing(DistributedWriter(self._folder, max_file_bytes=self._max_bytes, part=len(parts))) as writer:
            others = self._outline.others
            writer.add_object([one.unique_key for one in others if one.data is None], [None])  # usually all
            for one in others:
                if one.data is not None:
                    writer.add_object([one.unique_key], [one.data])
            objects = writer.record()
        torch.save({"checkpoint_version": 3.0}, self._folder / COMMON)
        (self._folder / CONFIG).write_text(json.dumps(VERSIONS), encoding="utf-8")
        write_metadata(self._folder, [*parts, objects])
