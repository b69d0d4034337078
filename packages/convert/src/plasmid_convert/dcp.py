"""Checkpoints in torch's distributed format with Hugging Face tensor names, as trainer 'fsdp' writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from plasmid.components import Converter, PartWriter, TensorInfo
from plasmid.errors import ModelError, abbreviate
from plasmid_models.pieces import Piece, Pieces, pieces_of_folder
from plasmid_models.text_model import FolderNames
from pydantic import Field

from .companions import SourceModel, find_source_model, is_of_run, read_config
from .hf import HF
from .parts import pack

if TYPE_CHECKING:
    from torch import Tensor

    from .distributed.files import DistributedFiles

METADATA, MEGATRON_METADATA = ".metadata", "metadata.json"
CRITIC = "critic."
ADAPTER = ".lora_A"
"""Suffix of the name of one adapter matrix of each adapted layer."""
CORRECTION = "e_score_correction_bias"
"""Suffix of a router tensor that models, engines and exported folders keep in float32, regardless of their dtype."""
HEAD = "score."
"""Prefix of the value head, which only critics have."""


class DCP(Converter):
    """Folder of `torch.distributed.checkpoint`, as trainer 'fsdp' writes it: a run's batch-000010, or its `trainer`."""

    preloaded: ClassVar = (f"{__package__}.distributed.files",)
    kind: Literal["dcp"] = "dcp"
    prefix: str = "weights."
    """Prefix of the Hugging Face tensor names; other tensors are ignored. Use ``weights.critic.`` for a run's
    critic."""
    dtype: Literal["auto", "keep", "float32", "bfloat16", "float16"] = "auto"
    """Dtype that floating-point weights are cast to when read. ``auto`` casts a run's checkpoint like `rl export` does
    and leaves others unchanged; ``keep`` never casts."""
    model: str = "auto"
    """Hugging Face folder with config and tokenizer; ``auto`` is the checkpoint's own folder, or the model folder in
    the run's recipe."""
    max_file_gb: float = Field(5.0, gt=0)
    """Maximum size of a file, in units of 10^9 bytes; a larger tensor gets its own file."""

    def recognises(self, path: Path) -> bool:
        weights = find_weights_folder(path)
        return weights is not None and not (weights / MEGATRON_METADATA).is_file()

    def open_tensors(self, path: Path) -> _OpenDCP:
        from plasmid_models.folder_writer import UntrainedWeights  # imports torch

        from .distributed.files import DistributedFiles

        weights = _weights(path)
        files = DistributedFiles(weights)
        dtype: str | None = None if self.dtype in ("auto", "keep") else self.dtype
        if self.dtype == "auto" and is_of_run(weights):
            dtype = self._find_model(path).dtype("auto")
        names = self._names(path, files.tensors)
        folder = self._model_folder(path)
        if folder is None:
            return _OpenDCP(files, self.prefix, names, dtype)
        pieces, rest = _pieces(folder, names), UntrainedWeights(folder, where="from.model")
        return _OpenDCP(files, self.prefix, names, dtype, pieces=pieces, others=rest)

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        opened = self.open_tensors(path)
        yield from opened.read({info.name for info in opened.tensors})

    def open_parts(self, path: Path) -> PartWriter:
        return _PartWriter(path, self.prefix, round(self.max_file_gb * 1e9))

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from .distributed.files import DistributedWriter

        writer = DistributedWriter(path, max_file_bytes=round(self.max_file_gb * 1e9))
        try:
            for name, tensor in tensors:
                writer.add(self.prefix + name, tensor)
            if not writer.finish():
                raise ModelError("the source has no tensors")
        finally:
            writer.close()

    def write_companions(self, source: Path, target: Path) -> None:
        of = self._find_model(source)
        of.copy(target, dtype=of.dtype(self.dtype))

    def _find_model(self, path: Path) -> SourceModel:
        return find_source_model(path, self.model, _weights(path))

    def _model_folder(self, path: Path) -> Path | None:
        """Return the model folder of a run; None if it has no weights."""
        folder = self._find_model(path).model if is_of_run(_weights(path)) else None
        return folder if folder is not None and HF().recognises(folder) else None

    def _names(self, path: Path, names: Iterable[str]) -> list[str]:
        """Return the Hugging Face names in the order of the checkpoint. Raises `ModelError`."""
        names = list(names)
        found = [name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix)]
        if self.prefix == "weights.":
            found = [name for name in found if not name.startswith(CRITIC)]
        if any(name.endswith(ADAPTER) for name in found):
            raise ModelError(
                f"{path}: contains an adapter instead of model weights; rl export merges the adapter of a run"
            )
        if not found:
            shown = abbreviate(names) or "nothing"
            raise ModelError(
                f"{path}: no name begins with {self.prefix!r}, the names are {shown}; set from.prefix to the prefix of "
                "the Hugging Face names"
            )
        return found


class _OpenDCP:
    """Implements `plasmid.components.OpenCheckpoint`."""

    def __init__(
        self,
        files: DistributedFiles,
        prefix: str,
        names: Sequence[str],
        dtype: str | None,
        *,
        pieces: Pieces | None = None,
        others: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """``pieces`` are those of the model folder; ``others`` are its tensors that are not in the checkpoint."""
        import torch

        from .safetensors_files import cast, describe

        self._files, self._prefix, self._dtype, self._others = files, prefix, dtype, others
        self._pieces = {name: (pieces or {}).get(name, (Piece(name),)) for name in names}
        self.tensors: list[TensorInfo] = []
        for name, found in self._pieces.items():
            entry = files.tensors[prefix + name]
            stored = cast(torch.empty((), dtype=entry.properties.dtype, device="meta"), self._cast_to(name)).dtype
            self.tensors += [
                describe(piece.name, stored, piece.shape(entry.size) if piece.index else entry.size) for piece in found
            ]
        self.tensors += [describe(name, tensor.dtype, tensor.shape) for name, tensor in others]

    def read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        from .safetensors_files import cast

        for name, found in self._pieces.items():
            wanted = [piece for piece in found if piece.name in names]
            if wanted:
                whole = cast(self._files.read(self._prefix + name), self._cast_to(name))
                for piece in wanted:
                    yield piece.name, piece.of(whole)
        yield from ((name, tensor) for name, tensor in self._others if name in names)

    def _cast_to(self, name: str) -> str | None:
        return None if name.endswith(CORRECTION) else self._dtype


class _PartWriter:
    """Writes separate files for each part. Implements `plasmid.components.PartWriter`."""

    def __init__(self, folder: Path, prefix: str, max_bytes: int) -> None:
        self._folder, self._prefix, self._max_bytes = folder, prefix, max_bytes

    def plan(self, tensors: Sequence[TensorInfo]) -> Sequence[Sequence[TensorInfo]]:
        return pack([[info] for info in tensors], self._max_bytes)

    def write(
        self, number: int, count: int, part: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]
    ) -> Mapping[str, Any]:
        from .distributed.files import DistributedWriter

        with closing(DistributedWriter(self._folder, max_file_bytes=self._max_bytes, part=number)) as writer:
            for name, tensor in tensors:
                writer.add(self._prefix + name, tensor)
            return writer.record()

    def join(self, parts: Sequence[Mapping[str, Any]]) -> None:
        from .distributed.files import write_metadata

        write_metadata(self._folder, parts)


def _pieces(folder: Path, names: Iterable[str]) -> Pieces:
    """Map a checkpoint's tensors, which transformers may fuse or rename, to those of a model folder."""
    stored = {name for _, found in HF()._plan(folder) for name in found}
    of_folder = FolderNames.of(read_config(folder / "config.json"), stored)
    of_model = {own for name in stored if (own := of_folder.in_model(name)) is not None}
    is_alike = all(name in of_model or name.startswith(HEAD) for name in names)
    fused = {} if is_alike else pieces_of_folder(folder, of_model)
    found = {name: fused.get(name, (Piece(name),)) for name in names}
    return {name: tuple(Piece(of_folder.in_folder(p.name), p.index) for p in parts) for name, parts in found.items()}


def find_weights_folder(path: Path) -> Path | None:
    """Return the folder with the weights: ``path``, or the trainer's subfolder of a run's checkpoint; else None."""
    return next((folder for folder in (path, path / "trainer") if (folder / METADATA).is_file()), None)


def _weights(path: Path) -> Path:
    found = find_weights_folder(path)
    if found is None:
        raise ModelError(f"{path}: not in torch's distributed format (it has no {METADATA})")
    if (found / MEGATRON_METADATA).is_file():
        raise ModelError(f"{path}: in Megatron's distributed format; read it with --from torch_dist")
    return found
