"""Matrices in fp8 with a scale per block, as DeepSeek-V3 and others store them. They are read as float32.

In such a folder ``quantization_config`` has ``weight_block_size``, and a matrix ``a.weight`` in ``float8_e4m3fn`` comes
with ``a.weight_scale_inv``, which has one number per block: the factor of its elements (DeepSeek-AI 2024, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from .slices import QuantizedSlice

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = "_scale_inv"
FP8 = ("F8_E4M3",)
"""Names of the dtype in safetensors files."""
Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """The format of folders with matrices in fp8 and scales per block."""

    block: Block
    """Rows and columns of a block."""

    def plain_slices(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Replace slices of matrices in fp8 by `BlockSlice`, without those of their scales. Raises ValueError."""
        return {
            name: BlockSlice(name, part, found.get(name + SUFFIX), self.block) if part.get_dtype() in FP8 else part
            for name, part in found.items()
            if not (name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in found)
        }


class BlockSlice(QuantizedSlice):
    """Lazy slice of a matrix in fp8 and of its scales; indexing it by rows reads and multiplies them."""

    def __init__(self, name: str, weight: Any, scale: Any, block: Block) -> None:
        """Raises ValueError if scales are missing or have another shape than the matrix requires."""
        if scale is None:
            raise ValueError(f"{name} is in fp8, but {name}{SUFFIX} is missing")
        self._weight, self._scale, self._block = weight, scale, block
        shape, have = tuple(weight.get_shape()), list(scale.get_shape())
        need = [-(-size // of_block) for size, of_block in zip(shape, block, strict=False)]
        if len(shape) != 2 or have != need:
            raise ValueError(f"{name}{SUFFIX} is {have} instead of {need} for {list(shape)} in blocks of {list(block)}")

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix."""
        return list(self._weight.get_shape())

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype in which the matrix is read."""
        return "F32"

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read the rows in float32."""
        start, stop = self._range(rows)
        height = self._block[0]
        scale = self._scale[start // height : -(-stop // height)]
        return dequantize(self._weight[start:stop], scale, self._block, first_row=start % height)


def dequantize(weight: Tensor, scale: Tensor, block: Block, *, first_row: int = 0) -> Tensor:
    """Return [m, n] in float32, each element times the scale of its block. ``first_row`` counts within its block."""
    import torch

    rows = (torch.arange(weight.shape[0]) + first_row) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale.float()[rows][:, columns]
