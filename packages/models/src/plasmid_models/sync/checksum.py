"""Checksum of tensors with the same value on CPU and GPU, fast enough for all weights in every sync.

Libraries (zlib, xxhash, hashlib) run on the CPU only, so weights would have to be copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 16
"""Number of 32-bit words per row; all rows share one table of factors. Changing it changes the checksums."""
_ROWS_AT_ONCE = {"cpu": 1, "cuda": 128}
"""Rows per operation, which bounds the extra memory (8 bytes per word). One row fits a core's cache; GPUs need more
work per launch."""
RowSums = Callable[[Tensor, Tensor], Tensor]
_ROW_FACTOR = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def checksum(tensor: Tensor) -> int:
    """Return a 64-bit checksum of a tensor's bytes that depends on their positions, the same on every device.

    It is the sum of 32-bit words times odd 64-bit factors, modulo 2**64. A change of a single word is always detected,
    two swapped words except for one pair in about 2**32. The last word is padded with zeros; the length is added.
    """
    data = as_bytes(tensor)
    words = _words(data)
    factors = _factors(str(words.device))
    total = data.numel()
    if words.numel():  # sum on the device, so that only one number is copied to the host
        rows = _kernel(words.device.type)(words, factors)
        total += int((rows * _row_factors(_power_of_two(len(rows)), str(rows.device))[: len(rows)]).sum())
    return total % _MODULUS


def as_bytes(tensor: Tensor) -> Tensor:
    """Return [bytes] uint8, the tensor's content in row-major order; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(data: Tensor) -> Tensor:
    missing = -data.numel() % 4
    if missing:
        data = torch.nn.functional.pad(data, (0, missing))
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


@lru_cache(maxsize=16)
def _kernel(device: str) -> RowSums:
    if device == "cuda":
        try:
            from .checksum_triton import row_sums
        except ImportError:
            return _row_sums
        return row_sums
    return _row_sums


def _row_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Return [rows] sums of words times factors; the last row may be partial."""
    step = ROW * _ROWS_AT_ONCE.get(words.device.type, 1)
    return torch.cat([_some(words[start : start + step], factors) for start in range(0, words.numel(), step)])


def _some(words: Tensor, factors: Tensor) -> Tensor:
    whole = words.numel() // ROW * ROW
    sums = [(words[:whole].view(-1, ROW) * factors).sum(1)]
    if whole < words.numel():
        rest = words[whole:]
        sums.append((rest * factors[: rest.numel()]).sum().view(1))
    return torch.cat(sums)


@lru_cache(maxsize=16)
def _factors(device: str) -> Tensor:
    """Return [ROW] odd pseudo-random int64 (splitmix64 of the position, Steele et al. 2014)."""
    x = (np.arange(1, ROW + 1, dtype=np.uint64)) * np.uint64(_ROW_FACTOR)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)


@lru_cache(maxsize=16)
def _row_factors(count: int, device: str) -> Tensor:
    """Return [count] powers of an odd number, starting with the first."""
    powers = np.cumprod(np.full(count, _ROW_FACTOR, dtype=np.uint64))
    return torch.from_numpy(powers.view(np.int64)).to(device)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
