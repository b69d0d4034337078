"""Lazy slices of quantized tensors, which are dequantized when read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import EllipsisType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class QuantizedSlice(ABC):
    """Has the interface of a slice of safetensors: its shape, its dtype, and its rows by index."""

    @abstractmethod
    def get_shape(self) -> list[int]:
        """Return the shape of the dequantized tensor."""

    @abstractmethod
    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype in which the tensor is read."""

    @abstractmethod
    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read rows, or all of them."""

    def _range(self, rows: slice | EllipsisType) -> tuple[int, int]:
        """Return the first of the rows, and the one after the last."""
        start, stop, _ = (slice(None) if rows is ... else rows).indices(self.get_shape()[0])
        return start, max(start, stop)
