"""What Megatron's layouts have in common: where the weights are, whose model they are, how many tokens it has."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from plasmid.components import Converter
from plasmid.errors import ModelError
from plasmid.utils.safe_files import in_folder
from plasmid_convert.companions import Described, described
from pydantic import Field

if TYPE_CHECKING:
    from torch import Tensor

    from .outline import Entry, Outline

LATEST = "latest_checkpointed_iteration.txt"


class Weights(Protocol):
    """The weights of a checkpoint that has been opened."""

    def read(self, entry: Entry) -> Tensor:
        """One of Megatron's weights, whole. Raises `ModelError`."""
        ...


class MegatronLayout(Converter):
    """A layout with Megatron's names of weights. Which model they are of follows from a ``config.json``."""

    model: str = "auto"
    """Hugging Face folder with config and tokenizer; ``auto`` is the checkpoint's own, or that of the run's recipe."""
    dtype: Literal["auto", "keep", "float32", "bfloat16", "float16"] = "auto"
    """What floats become when they are read: ``auto`` is what `rl export` makes of a run's checkpoint, else as is."""
    vocab_size: Literal["auto"] | int = Field("auto")
    """Rows of the vocabulary that are read, without what fills it up; ``auto`` is what the model's config says."""

    @abstractmethod
    def folder_of(self, path: Path) -> Path | None:
        """The folder with the weights in what the user has named, if there is one."""

    @abstractmethod
    def open_weights(self, folder: Path, outline: Outline) -> Weights:
        """Raises `ModelError` if names in it are not those of the model."""

    def recognises(self, path: Path) -> bool:
        return self.folder_of(path) is not None

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        from plasmid_convert.casting import cast

        of = self._described(path)
        outline = outline_of(of.model, vocab_size=self._rows())
        weights = self.open_weights(self._folder(path), outline)
        dtype = of.dtype(self.dtype)
        for entry in outline.entries:
            for name, tensor in outline.to_hf(entry, weights.read(entry)):
                yield name, tensor if entry.is_correction else cast(tensor, dtype)
        if of.of_run:
            yield from outline.untrained()

    def write_companions(self, source: Path, target: Path) -> None:
        of = self._described(source)
        of.copy(target, dtype=of.dtype(self.dtype), vocab_size=self._rows())

    def _folder(self, path: Path) -> Path:
        found = self.folder_of(path)
        if found is None:
            raise ModelError(f"{path}: holds no checkpoint of layout {self.kind}")  # type: ignore[attr-defined]
        return found

    def _described(self, path: Path) -> Described:
        return described(path, self.model, self._folder(path))

    def _rows(self) -> int | None:
        return None if self.vocab_size == "auto" else self.vocab_size


def outline_of(source: Path, *, vocab_size: int | None = None, multiple: int = 1) -> Outline:
    """`read_outline`, without what Megatron says of packages that are not installed. Raises `ModelError`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from .outline import read_outline

        try:
            return read_outline(source, vocab_size=vocab_size, multiple=multiple)
        except ModelError as error:
            raise ModelError(str(error).removeprefix("model.path: ").removeprefix("trainer: ")) from error


def newest(path: Path) -> Path:
    """The folder of the iteration that Megatron's own scripts would load, or ``path`` where they have left no word."""
    try:
        last = (path / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return path
    if last.isdecimal() and len(last) < 20:
        last = f"iter_{int(last):07}"
    return path / in_folder(path / LATEST, last)
