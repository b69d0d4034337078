"""Triton kernels of `softmax_rows`; each reads the logits of a chunk once, and writes them at most once.

Imported only with a GPU and Triton. Sums are fp32; NaN and infinite logits give the same results as in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .softmax_rows import RowGradients, RowStats, SoftmaxKernels

LOWEST = tl.constexpr(-3.4e38)
"""About the lowest finite fp32 value; a running maximum that starts at -inf would give exp(-inf + inf)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch parameters of a kernel: block size in logits, number of warps, number of pipeline stages of loads."""

    block: int
    num_warps: int
    num_stages: int = 1


STATS = Launch(block=4096, num_warps=8, num_stages=3)
GRADIENT = Launch(block=4096, num_warps=8)


@triton.jit
def _stats_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    sums: tl.tensor,
    chosen: tl.tensor,
    entropy: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Compute maximum m, sum of exp(z - m) and sum of exp(z - m) (z - m) in one pass; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    inverse = 1.0 / tl.load(temperatures + row).to(tl.float32)
    top = LOWEST
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        places = start + tl.arange(0, BLOCK)
        z = tl.load(logits + places, mask=places < width, other=-float("inf")).to(tl.float32) * inverse
        higher = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - higher)
        z -= higher
        weights = tl.exp(z)
        if WITH_ENTROPY:
            # 0 * -inf would be NaN, but NaN logits must propagate
            finite = tl.maximum(z, LOWEST, propagate_nan=tl.PropagateNan.ALL)
            weighted = (weighted + total * (top - higher)) * shrink + weights * finite
        total = total * shrink + weights
        top = higher
    mass = tl.sum(total, 0)
    tl.store(tops + row, top)
    tl.store(sums + row, mass)
    if WITH_ENTROPY:
        tl.store(entropy + row, tl.log(mass) - tl.sum(weighted, 0) / mass)
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < width)
    tl.store(chosen + row, tl.load(logits + target, mask=here, other=0.0).to(tl.float32) * inverse)


@triton.jit
def _gradient_kernel(
    logits: tl.tensor,
    targets: tl.tensor,
    temperatures: tl.tensor,
    tops: tl.tensor,
    logs: tl.tensor,
    up_logprobs: tl.tensor,
    entropy: tl.tensor,
    up_entropy: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    first: tl.tensor,
    num_blocks: tl.tensor,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Overwrite logits with their gradient; one program per block of a row."""
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    places = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    logits += row * stride
    inverse = 1.0 / tl.load(temperatures + row).to(tl.float32)
    up = tl.load(up_logprobs + row).to(tl.float32) * inverse
    z = tl.load(logits + places, mask=inside, other=-float("inf")).to(tl.float32) * inverse
    logprobs = (z - tl.load(tops + row)) - tl.load(logs + row)
    probs = tl.exp(logprobs)
    grad = -up * probs
    if WITH_ENTROPY:
        slope = tl.load(up_entropy + row).to(tl.float32) * inverse
        finite = tl.maximum(logprobs, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        grad -= slope * (probs * (finite + tl.load(entropy + row)))
    target = tl.load(targets + row) - first
    grad = tl.where(places == target, grad + up, grad)
    tl.store(logits + places, grad.to(logits.dtype.element_ty), mask=inside)


def triton_stats(
    logits: Tensor, targets: Tensor, temperatures: Tensor, *, first: int, with_entropy: bool, launch: Launch = STATS
) -> RowStats:
    tops = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    sums, chosen = torch.empty_like(tops), torch.empty_like(tops)
    entropy = torch.empty_like(tops) if with_entropy else None
    if len(logits):
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _stats_kernel[(len(logits),)](
                logits,
                targets.contiguous(),
                temperatures.contiguous(),
                tops,
                sums,
                chosen,
                entropy if entropy is not None else tops,
                logits.stride(0),
                logits.shape[1],
                first,
                WITH_ENTROPY=with_entropy,
                BLOCK=_block(logits, launch),
                STAGES=launch.num_stages,
                num_warps=launch.num_warps,
            )
    return RowStats(tops, sums, chosen, entropy)


def triton_gradient(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    upstream: RowGradients,
    *,
    first: int,
    launch: Launch = GRADIENT,
) -> Tensor:
    block = _block(logits, launch)
    num_blocks = triton.cdiv(logits.shape[1], block)
    entropy, up_entropy = upstream.entropy, upstream.up_entropy
    with_entropy = entropy is not None and up_entropy is not None
    if len(logits):
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
            _gradient_kernel[(len(logits) * num_blocks,)](
                logits,
                targets.contiguous(),
                temperatures.contiguous(),
                upstream.tops,
                upstream.logs,
                upstream.up_logprobs.contiguous(),
                entropy if entropy is not None else upstream.tops,
                up_entropy.contiguous() if up_entropy is not None else upstream.tops,
                logits.stride(0),
                logits.shape[1],
                first,
                num_blocks,
                WITH_ENTROPY=with_entropy,
                BLOCK=block,
                num_warps=launch.num_warps,
            )
    return logits


TRITON = SoftmaxKernels(stats=triton_stats, gradient=triton_gradient)


def _block(logits: Tensor, launch: Launch) -> int:
    return int(min(launch.block, triton.next_power_of_2(logits.shape[1])))
