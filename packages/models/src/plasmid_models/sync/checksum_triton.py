"""Triton kernel for the row sums of `checksum`, which reads every byte once. Imported only with a GPU and Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 4096, 8


@triton.jit
def _row_kernel(
    words: tl.tensor,
    factors: tl.tensor,
    sums: tl.tensor,
    count: tl.tensor,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum one row of words; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, ROW, BLOCK):
        places = start + tl.arange(0, BLOCK)
        word = tl.load(words + row * ROW + places, mask=row * ROW + places < count, other=0)
        total += word.to(tl.int64) * tl.load(factors + places)
    tl.store(sums + row, tl.sum(total, 0))


def row_sums(words: Tensor, factors: Tensor) -> Tensor:
    """Return [rows] int64 sums of int32 words times the factors of a row; the last row may be partial."""
    row, count = factors.numel(), words.numel()
    sums = torch.empty(-(-count // row), dtype=torch.int64, device=words.device)
    _row_kernel[(len(sums),)](words, factors, sums, count, ROW=row, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return sums
