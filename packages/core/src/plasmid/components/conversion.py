"""What a plugin subclasses to read and write a checkpoint layout."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .base import Component

if TYPE_CHECKING:
    from torch import Tensor

    NamedTensor = tuple[str, Tensor]


class Converter(Component, slot="converters"):
    """Reads and writes one checkpoint layout. Tensors carry Hugging Face names, so any two layouts convert."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[NamedTensor]:
        """Yield the tensors one by one; a checkpoint may be larger than memory. Raises `ModelError`."""

    @abstractmethod
    def write(self, path: Path, tensors: Iterable[NamedTensor]) -> None:
        """Write into the folder ``path``, which has the Hugging Face files of the model already.

        The folder gets its name once this returns, and vanishes if it raises: `ModelError`, or `OSError` of the disk.
        """

    def recognises(self, path: Path) -> bool:
        """True if ``path`` is surely a checkpoint of this layout; lets `rl convert` do without ``--from``."""
        return False

    def num_tensors(self, path: Path) -> int | None:
        """How many tensors `read` will yield, for progress bars; None if that is not known beforehand."""
        return None

    def write_companions(self, source: Path, target: Path) -> None:
        """Write what travels beside the weights of ``source`` (config, tokenizer), as Hugging Face files."""
