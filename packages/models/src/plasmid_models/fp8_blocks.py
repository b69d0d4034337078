"""Matrices in fp8 with a scale per block, as DeepSeek-V3 and others store them. They are read as float32.

In such a folder ``quantization_config`` has ``weight_block_size``, and a matrix ``a.weight`` in ``float8_e4m3fn`` comes
with ``a.weight_scale_inv``, which has one number per block: the factor of its elements (DeepSeek-AI 2024, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KEY = "quantization_config"
SUFFIX = "_scale_inv"
FP8 = ("F8_E4M3",)
"""Names of the dtype in safetensors files."""
Block = tuple[int, int]


def block_size(config: Mapping[str, Any]) -> Block | None:
    """Return the rows and columns of a block according to a ``config.json``; None if no weights are quantized.

    Raises ValueError if they are quantized in another way.
    """
    found = config.get(KEY)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    size = found.get("weight_block_size") if isinstance(found, Mapping) and method == "fp8" else None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n < 1 << 20 for n in size):
        raise ValueError(
            f"the model's weights are quantized ({str(method)[:40]}), which only fp8 with weight_block_size may be; "
            "use a copy in bfloat16"
        )
    return size[0], size[1]


def is_in_blocks(config: Mapping[str, Any]) -> bool:
    """Return True if matrices are stored in fp8 with a scale per block."""
    try:
        return block_size(config) is not None
    except ValueError:
        return False


def without_blocks(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the same model with plain weights, as it is after reading them here."""
    return {key: value for key, value in config.items() if key != KEY} if is_in_blocks(config) else config


def forget_blocks(config: Any) -> None:
    """Remove the quantization from transformers' config object, so that models are built for plain weights."""
    if is_in_blocks(config.to_dict()):
        del config.quantization_config


def is_scale(name: str, names: Mapping[str, Any]) -> bool:
    """Return True if a tensor has the scales of another one of ``names``."""
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in names


def dequantize_slices(found: Mapping[str, Any], block: Block) -> dict[str, Any]:
    """Replace slices of matrices in fp8 by `BlockSlice`, without those of their scales. Raises ValueError."""
    return {
        name: BlockSlice(name, part, found.get(name + SUFFIX), block) if part.get_dtype() in FP8 else part
        for name, part in found.items()
        if not is_scale(name, found)
    }


class BlockSlice:
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
        start, stop, _ = slice(None).indices(self.get_shape()[0]) if rows is ... else rows.indices(self.get_shape()[0])
        height = self._block[0]
        scale = self._scale[start // height : -(-stop // height)]
        return dequantize(self._weight[start:stop], scale, self._block, first_row=start % height)


def dequantize(weight: Tensor, scale: Tensor, block: Block, *, first_row: int = 0) -> Tensor:
    """Return [m, n] in float32, each element times the scale of its block. ``first_row`` counts within its block."""
    import torch

    rows = (torch.arange(weight.shape[0]) + first_row) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scale.float()[rows][:, columns]
