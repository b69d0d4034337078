"""A checksum of tensors that CPU and GPU agree on, fast enough to take of every weight at every sync."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROW = 1 << 16
"""32-bit words that share one table of factors. Part of the definition: another value gives other checksums."""
_ROWS_AT_ONCE = {"cpu": 1, "cuda": 256}
"""Bounds the extra memory: 8 bytes a word. One row stays in a core's cache; a GPU wants more work per launch."""
_ROW_FACTOR = 0x9E3779B97F4A7C15
_MODULUS = 1 << 64


def checksum(tensor: Tensor) -> int:
    """A 64-bit sum over the bytes of a tensor in which every position counts differently, the same on every device.

    Words of 32 bits times odd 64-bit factors, modulo 2**64: a change of a single word is always found, two swapped
    words but for one pair in about 2**32. Bytes of no whole word are filled up with zeros; the length counts, too.
    """
    data = as_bytes(tensor)
    num_bytes = data.numel()
    words = _words(data)
    factors = _factors(str(words.device))
    total, rows = num_bytes % _MODULUS, 0
    step = ROW * _ROWS_AT_ONCE.get(words.device.type, 1)
    for start in range(0, words.numel(), step):
        sums = _row_sums(words[start : start + step], factors)
        for value in sums.tolist():
            rows += 1
            total += value * pow(_ROW_FACTOR, rows, _MODULUS)
    return total % _MODULUS


def as_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8: the tensor's content in row-major order, without a copy where it lies so already."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(data: Tensor) -> Tensor:
    missing = -data.numel() % 4
    if missing:
        data = torch.nn.functional.pad(data, (0, missing))
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _row_sums(words: Tensor, factors: Tensor) -> Tensor:
    """[rows] sums of words times factors, one for each started row."""
    whole = words.numel() // ROW * ROW
    sums = [(words[:whole].view(-1, ROW).to(torch.int64) * factors).sum(1)]
    if whole < words.numel():
        rest = words[whole:]
        sums.append((rest.to(torch.int64) * factors[: rest.numel()]).sum().view(1))
    return torch.cat(sums)


@lru_cache(maxsize=16)
def _factors(device: str) -> Tensor:
    """[ROW] odd pseudo-random int64 (splitmix64 of the position, Steele et al. 2014)."""
    x = (np.arange(1, ROW + 1, dtype=np.uint64)) * np.uint64(_ROW_FACTOR)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64)).to(device)
