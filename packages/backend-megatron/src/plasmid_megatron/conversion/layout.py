"""Base class of Megatron's checkpoint layouts: location of the weights, their model, vocabulary size."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from plasmid.components import Converter, OpenCheckpoint
from plasmid.errors import ModelError
from plasmid.utils.safe_files import check_in_folder
from plasmid_convert.companions import SourceModel, find_source_model
from plasmid_convert.distributed.collection import paused_collection
from pydantic import Field

from ..upstream.imports import import_without_compiler

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .outline import Entry, Outline

LATEST = "latest_checkpointed_iteration.txt"


class Weights(Protocol):
    """The weights of an open checkpoint."""

    def read(self, entry: Entry) -> Tensor:
        """Read one of Megatron's weights, unsharded. Raises `ModelError`."""
        ...

    def dtype(self, entry: Entry) -> torch.dtype:
        """Return the dtype of one of Megatron's weights. Raises `ModelError` if it is missing."""
        ...


class MegatronLayout(Converter):
    """A layout with Megatron's weight names; the model's architecture is read from a ``config.json``."""

    preloaded: ClassVar = (f"{__package__}.preloaded",)
    model: str = "auto"
    """Hugging Face folder with config and tokenizer; ``auto`` is the checkpoint's own folder, or the model folder in
    the run's recipe."""
    dtype: Literal["auto", "keep", "float32", "bfloat16", "float16"] = "auto"
    """Dtype that floating-point weights are cast to when read. ``auto`` casts a run's checkpoint like `rl export` does
    and leaves others unchanged; ``keep`` never casts."""
    vocab_size: Literal["auto"] | int = Field("auto")
    """Vocabulary size to read, without padding; ``auto`` is that of the model's config."""

    @abstractmethod
    def folder_of(self, path: Path) -> Path | None:
        """Return the folder with the weights for the path that the user gave; None if there is none."""

    @abstractmethod
    def open_weights(self, folder: Path, outline: Outline) -> Weights:
        """Open the weights. Raises `ModelError` if their names are not those of the model."""

    def recognises(self, path: Path) -> bool:
        return self.folder_of(path) is not None

    def open_tensors(self, path: Path) -> OpenCheckpoint:
        source = self._find_model(path)
        outline = outline_of(source.model, vocab_size=self._rows())
        from .opened import OpenMegatron  # after Megatron was imported without its warnings

        weights = self.open_weights(self._folder(path), outline)
        return OpenMegatron(outline, weights, dtype=source.dtype(self.dtype), of_run=source.of_run)

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        opened = self.open_tensors(path)
        yield from opened.read({info.name for info in opened.tensors})

    def write_companions(self, source: Path, target: Path) -> None:
        model = self._find_model(source)
        model.copy(target, dtype=model.dtype(self.dtype), vocab_size=self._rows())

    def _folder(self, path: Path) -> Path:
        found = self.folder_of(path)
        if found is None:
            raise ModelError(f"{path}: contains no checkpoint of layout {self.kind}")  # type: ignore[attr-defined]
        return found

    def _find_model(self, path: Path) -> SourceModel:
        return find_source_model(path, self.model, self._folder(path))

    def _rows(self) -> int | None:
        return None if self.vocab_size == "auto" else self.vocab_size


def outline_of(source: Path, *, vocab_size: int | None = None, multiple: int = 1) -> Outline:
    """Call `read_outline` without Megatron's warnings about missing packages. Raises `ModelError`."""
    with warnings.catch_warnings(), paused_collection():
        warnings.simplefilter("ignore")
        with import_without_compiler():
            from .outline import read_outline

        try:
            return read_outline(source, vocab_size=vocab_size, multiple=multiple)
        except ModelError as error:
            raise ModelError(str(error).removeprefix("model.path: ").removeprefix("trainer: ")) from error


def latest_iteration(path: Path) -> Path:
    """Return the folder of the iteration that Megatron's scripts would load; ``path`` without a tracker file."""
    try:
        last = (path / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return path
    if last.isdecimal() and len(last) < 20:
        last = f"iter_{int(last):07}"
    return path / check_in_folder(path / LATEST, last)
