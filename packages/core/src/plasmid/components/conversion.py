"""Base class of converters, which read and write a checkpoint layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from .base import Component

if TYPE_CHECKING:
    from torch import Tensor

    NamedTensor = tuple[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint that has not been read."""

    name: str
    dtype: str
    """Name of the torch dtype, such as ``bfloat16``."""
    shape: tuple[int, ...]
    num_bytes: int


class OpenCheckpoint(Protocol):
    """A checkpoint whose tensors can be read in any order."""

    @property
    def tensors(self) -> Sequence[TensorInfo]:
        """All tensors, in the order in which they are read fastest."""
        ...

    def read(self, names: Collection[str]) -> Iterator[NamedTensor]:
        """Yield the tensors with these names, in the order of `tensors`. Raises `ModelError`."""
        ...


class PartWriter(Protocol):
    """Writes a checkpoint in parts, each with its own files. Several processes may write parts."""

    def plan(self, tensors: Sequence[TensorInfo]) -> Sequence[Sequence[TensorInfo]]:
        """Split the tensors of the source into parts, always in the same way. Raises `ModelError`."""
        ...

    def write(
        self, number: int, count: int, part: Sequence[TensorInfo], tensors: Iterable[NamedTensor]
    ) -> Mapping[str, Any]:
        """Write part ``number`` of ``count``, from 0, and sync its files to disk. Raises `ModelError` or `OSError`.

        Returns the arguments for `join`, as JSON types; ``files`` are the names of the part's files.
        """
        ...

    def join(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Complete the folder from the results of `write` for all parts. Raises `OSError`."""
        ...


class Converter(Component, slot="converters"):
    """Reads and writes one checkpoint layout. Tensors have Hugging Face names, so any two layouts can be converted."""

    preloaded: ClassVar[tuple[str, ...]] = ()
    """Modules that opening a checkpoint imports. The fork server imports them once for all worker processes."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[NamedTensor]:
        """Yield the tensors one by one, since a checkpoint may be larger than memory. Raises `ModelError`."""

    @abstractmethod
    def write(self, path: Path, tensors: Iterable[NamedTensor]) -> None:
        """Write into the folder ``path``, which already contains the model's Hugging Face files.

        ``path`` is temporary: it is renamed when this returns and deleted when it raises `ModelError` or `OSError`.
        """

    def recognises(self, path: Path) -> bool:
        """Return True if ``path`` certainly has this layout, so that `rl convert` does not need ``--from``."""
        return False

    def open_tensors(self, path: Path) -> OpenCheckpoint | None:
        """Open the checkpoint to read tensors by name. Raises `ModelError`.

        With None, conversions from this layout have one process, cannot be continued and show no percentage.
        """
        return None

    def open_parts(self, path: Path) -> PartWriter | None:
        """Open the folder ``path``, as for `write`, to write it in parts. Raises `ModelError`.

        With None, conversions to this layout have one process and cannot be continued.
        """
        return None

    def write_companions(self, source: Path, target: Path) -> None:
        """Write the files that accompany the weights of ``source`` (config, tokenizer) in Hugging Face format."""
