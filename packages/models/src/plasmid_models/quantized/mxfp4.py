"""Experts in mxfp4, as gpt-oss stores them: numbers of 4 bits with a scale per 32. They are read as bfloat16.

The matrix ``a`` [experts, in, out] is stored transposed, as ``a_blocks`` [experts, out, in / 32, 16] with two numbers
per byte, the first in the low bits, and ``a_scales`` [experts, out, in / 32], exponents of 2 with a bias of 127 (OCP
Microscaling Formats v1.0). The products are exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from plasmid.errors import ModelError

from .slices import QuantizedSlice

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
BYTE = "U8"
"""Name of the dtype of both in safetensors files."""
BYTES = 16
"""Bytes of a block of 32 numbers."""
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers by their three low bits; the fourth is the sign."""


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The format of folders in mxfp4."""

    def plain_slices(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Replace slices of blocks and scales by `Mxfp4Slice`. Raises ValueError if they do not fit together."""
        plain: dict[str, Any] = {}
        for name, part in found.items():
            if name.endswith(SCALES):
                if name.removesuffix(SCALES) + BLOCKS not in found:
                    raise ValueError(f"{name} is without {name.removesuffix(SCALES)}{BLOCKS}")
            elif name.endswith(BLOCKS):
                whole = name.removesuffix(BLOCKS)
                if whole in found:
                    raise ValueError(f"{whole} is stored both in mxfp4 and unquantized")
                plain[whole] = Mxfp4Slice(whole, part, found.get(whole + SCALES))
            else:
                plain[name] = part
        return plain


class Mxfp4Slice(QuantizedSlice):
    """Lazy slice of the matrices of a layer's experts, which are its rows."""

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        """Raises ValueError if scales are missing or shapes and dtypes are not those of mxfp4."""
        if scales is None:
            raise ValueError(f"{name}{BLOCKS} is in mxfp4, but {name}{SCALES} is missing")
        shape, of_scales = list(blocks.get_shape()), list(scales.get_shape())
        if len(shape) != 4 or shape[-1] != BYTES:
            raise ValueError(f"{name}{BLOCKS} is {shape} instead of [experts, out, in / 32, {BYTES}]")
        if of_scales != shape[:-1]:
            raise ValueError(f"{name}{SCALES} is {of_scales} instead of {shape[:-1]} for blocks of {shape}")
        for suffix, part in ((BLOCKS, blocks), (SCALES, scales)):
            if part.get_dtype() != BYTE:
                raise ValueError(f"{name}{suffix} has dtype {part.get_dtype()} instead of {BYTE}")
        self._name, self._blocks, self._scales = name, blocks, scales

    def get_shape(self) -> list[int]:
        """Return [experts, in, out]."""
        experts, rows, groups, _ = self._blocks.get_shape()
        return [experts, groups * 2 * BYTES, rows]

    def get_dtype(self) -> str:
        """Return the name of bfloat16."""
        return "BF16"

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        """Read experts in bfloat16. Raises `ModelError` for numbers that it cannot represent."""
        import torch

        start, stop = self._range(rows)
        found = torch.empty(stop - start, *self.get_shape()[1:], dtype=torch.bfloat16)
        for expert in range(start, stop):  # one by one, to limit the memory
            blocks, scales = (part[expert : expert + 1][0] for part in (self._blocks, self._scales))
            found[expert - start] = dequantize(blocks, scales).T
            if not bool(found[expert - start].isfinite().all()):
                raise ModelError(f"{self._name}{SCALES}: expert {expert} has numbers that are too large for bfloat16")
        return found


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [n, 32 g] in bfloat16 from blocks [n, g, 16] and scales [n, g]."""
    import torch

    numbers = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)])
    pairs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    return torch.ldexp(numbers[pairs], scales.int()[..., None] - BIAS).flatten(-2).bfloat16()
