"""Base class of converters, which read and write a checkpoint layout."""

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
    """Reads and writes one checkpoint layout. Tensors have Hugging Face names, so any two layouts can be converted."""

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

    def num_tensors(self, path: Path) -> int | None:
        """Return the number of tensors that `read` yields, for progress bars; None if unknown."""
        return None

    def write_companions(self, source: Path, target: Path) -> None:
        """Write the files that accompany the weights of ``source`` (config, tokenizer) in Hugging Face format."""
