"""Checkpoints in torch's distributed format with Hugging Face names in them: what trainer ``fsdp`` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.components import Converter
from plasmid.errors import ModelError, some_of
from plasmid_models.pieces import Piece, Pieces, pieces_of_folder
from pydantic import Field

from .companions import Described, described, is_of_run
from .hf import HF

if TYPE_CHECKING:
    from torch import Tensor

METADATA, OF_MEGATRON = ".metadata", "metadata.json"
CRITIC = "critic."
CORRECTION = "e_score_correction_bias"
"""Of experts; models and engines have it in float32 whatever they have all else in, and so have exported folders."""
HEAD = "score."
"""What a critic has and no language model."""


class DCP(Converter):
    """Folder of `torch.distributed.checkpoint`, as trainer 'fsdp' writes it: a run's batch-000010, or its `trainer`."""

    kind: Literal["dcp"] = "dcp"
    prefix: str = "weights."
    """What stands before Hugging Face's names; all else is left out. A run's critic has ``weights.critic.``"""
    dtype: Literal["auto", "keep", "float32", "bfloat16", "float16"] = "auto"
    """What floats become when they are read: ``auto`` is what `rl export` makes of a run's checkpoint, else as is."""
    model: str = "auto"
    """Hugging Face folder with config and tokenizer; ``auto`` is the checkpoint's own, or that of the run's recipe."""
    max_file_gb: float = Field(5.0, gt=0)
    """Largest file to write, in units of 10^9 bytes; one tensor is never split."""

    def recognises(self, path: Path) -> bool:
        weights = weights_folder(path)
        return weights is not None and not (weights / OF_MEGATRON).is_file()

    def num_tensors(self, path: Path) -> int | None:
        from .distributed_files import DistributedFiles

        names = self._names(path, DistributedFiles(_weights(path)).tensors)
        pieces = self._pieces(path, names)
        return sum(len(pieces.get(name, (name,))) for name in names)

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        from .casting import cast
        from .distributed_files import DistributedFiles

        weights = _weights(path)
        files = DistributedFiles(weights)
        dtype: str | None = None if self.dtype in ("auto", "keep") else self.dtype
        if self.dtype == "auto" and is_of_run(weights):
            dtype = self._described(path).dtype("auto")
        names = self._names(path, files.tensors)
        pieces = self._pieces(path, names)
        for name in names:
            whole = cast(files.read(self.prefix + name), None if name.endswith(CORRECTION) else dtype)
            for piece in pieces.get(name, (Piece(name),)):
                yield piece.name, piece.of(whole)

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from .distributed_files import DistributedWriter

        writer = DistributedWriter(path, max_file_bytes=round(self.max_file_gb * 1e9))
        try:
            for name, tensor in tensors:
                writer.add(self.prefix + name, tensor)
            if not writer.finish():
                raise ModelError("the source has no tensors")
        finally:
            writer.close()

    def write_companions(self, source: Path, target: Path) -> None:
        of = self._described(source)
        of.copy(target, dtype=of.dtype(self.dtype))

    def _described(self, path: Path) -> Described:
        return described(path, self.model, _weights(path))

    def _pieces(self, path: Path, names: Iterable[str]) -> Pieces:
        """What a run's model folder has one by one of tensors that transformers fuses."""
        folder = self._described(path).model if is_of_run(_weights(path)) else None
        if folder is None or not HF().recognises(folder):
            return {}
        of_folder = {name for _, found in HF()._plan(folder) for name in found}
        is_alike = all(name in of_folder or name.startswith(HEAD) for name in names)
        return {} if is_alike else pieces_of_folder(folder, of_folder)

    def _names(self, path: Path, names: Iterable[str]) -> list[str]:
        """Hugging Face names in the order of the checkpoint."""
        names = list(names)
        found = [name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix)]
        if self.prefix == "weights.":
            found = [name for name in found if not name.startswith(CRITIC)]
        if not found:
            shown = some_of(names) or "nothing"
            raise ModelError(
                f"{path}: no name in it begins with {self.prefix!r}; it holds {shown}; set from.prefix to what stands "
                "before Hugging Face's names"
            )
        return found


def weights_folder(path: Path) -> Path | None:
    """The folder with the files: ``path``, or that of the trainer in a run's checkpoint."""
    return next((folder for folder in (path, path / "trainer") if (folder / METADATA).is_file()), None)


def _weights(path: Path) -> Path:
    found = weights_folder(path)
    if found is None:
        raise ModelError(f"{path}: is no folder of torch's distributed format (it has no {METADATA})")
    if (found / OF_MEGATRON).is_file():
        raise ModelError(f"{path}: is of Megatron's distributed format; read it with --from torch_dist")
    return found
