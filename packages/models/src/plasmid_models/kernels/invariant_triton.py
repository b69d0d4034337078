"""Batch-invariant Triton kernels: the result of a row has the same bits regardless of the other rows of the batch.

Tiles have a fixed size and each reduction runs in a fixed order, without splits, so that the number of rows only
changes the number of programs. Imported only with a GPU and Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOWEST = tl.constexpr(-3.4e38)
"""About the lowest finite fp32 value, the initial maximum: -inf would give exp(-inf + inf)."""
WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def _matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute one tile of x [rows, depth] @ weight [width, depth]^T + bias, all contiguous."""
    num_m = tl.cdiv(rows, BLOCK_M)
    m = ((tl.program_id(0) % num_m) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = ((tl.program_id(0) // num_m) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = start + k < depth
        left = tl.load(
            x + m[:, None] * depth + (start + k)[None, :], mask=(m < rows)[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            weight + n[None, :] * depth + (start + k)[:, None], mask=(n < width)[None, :] & inside[:, None], other=0.0
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    mask = (m < rows)[:, None] & (n < width)[None, :]
    tl.store(out + m[:, None] * width + n[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _row_mean_kernel(x: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Compute the mean of one contiguous row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + places, mask=places < width, other=0.0).to(tl.float32)
    tl.store(out + row, (tl.sum(values, 0) / width).to(out.dtype.element_ty))


@triton.jit
def _add_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of keys to the running maximum and sums of the softmax."""
    scores = tl.where(visible, tl.dot(q, k, input_precision="ieee") * scale, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp(scores - higher[:, None])
    shrink = tl.exp(top - higher)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(weights, 1), acc


@triton.jit
def _attention_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    spans: tl.tensor,
    scale: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    out_token: tl.tensor,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Compute one tile of queries of one key head of one sequence, over its keys from the first on.

    A row of the tile is one of the GROUP query heads of one token. Keys after a row's token change nothing: they add
    exact zeros to its sums.
    """
    spans += tl.program_id(2) * 5
    query_start, query_len = tl.load(spans), tl.load(spans + 1)
    slot, key_start, key_len = tl.load(spans + 2), tl.load(spans + 3), tl.load(spans + 4)
    first = tl.program_id(0) * BLOCK_M
    if first < query_len * GROUP:
        head = tl.program_id(1).to(tl.int64)
        rows = first + tl.arange(0, BLOCK_M)
        tokens, members = rows // GROUP, rows % GROUP
        inside, positions = tokens < query_len, key_len - query_len + tokens
        d, e, heads = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), head * GROUP + members
        places = (query_start + tokens) * query_token + heads * query_head
        q = tl.load(query + places[:, None] + d[None, :], mask=inside[:, None] & (d < SIZE)[None, :], other=0.0)
        keys += slot * key_slot + key_start * key_token + head * key_head
        values += slot * value_slot + key_start * value_token + head * value_head
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        last = tl.minimum(key_len, key_len - query_len + (first + BLOCK_M - 1) // GROUP + 1)
        for start in range(0, last, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            known = n < key_len
            shape = known[:, None] & (d < SIZE)[None, :]
            k = tl.load(keys + n[:, None] * key_token + d[None, :], mask=shape, other=0.0)
            inner = known[:, None] & (e < VALUE_SIZE)[None, :]
            v = tl.load(values + n[:, None] * value_token + e[None, :], mask=inner, other=0.0)
            top, total, acc = _add_keys(q, tl.trans(k), v, n[None, :] <= positions[:, None], scale, top, total, acc)
        places = (query_start + tokens) * out_token + heads * VALUE_SIZE
        mask = inside[:, None] & (e < VALUE_SIZE)[None, :]
        tl.store(out + places[:, None] + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight = _align(x), _align(weight)
    out = x.new_empty(len(x), len(weight))
    small = x.dtype.itemsize == 2
    block_m, block_n, block_k = (64, 128, 64) if small else (64, 64, 32)
    if out.numel():
        grid = (triton.cdiv(len(x), block_m) * triton.cdiv(len(weight), block_n),)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _matmul_kernel[grid](
                x,
                weight,
                weight if bias is None else bias,
                out,
                len(x),
                len(weight),
                x.shape[1],
                HAS_BIAS=bias is not None,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_K=block_k,
                num_warps=WARPS,
                num_stages=4 if small else 2,
            )
    return out


def row_mean(x: Tensor) -> Tensor:
    x = _align(x)
    out = x.new_empty(x.shape[:-1])
    if out.numel():
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            _row_mean_kernel[(out.numel(),)](
                x, out, x.shape[-1], BLOCK=triton.next_power_of_2(x.shape[-1]), num_warps=WARPS
            )
    return out


def attention(query: Tensor, keys: Tensor, values: Tensor, spans: Tensor, longest: int, scale: float) -> Tensor:
    query, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, keys, values))
    heads, size, value_size = query.shape[1], query.shape[2], values.shape[3]
    group = heads // keys.shape[1]
    out = query.new_empty(len(query), heads, value_size)
    block_m, block_n = (64, 64) if query.dtype.itemsize == 2 else (32, 32)
    grid = (triton.cdiv(longest * group, block_m), keys.shape[1], len(spans))
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _attention_kernel[grid](
            query,
            keys,
            values,
            out,
            spans,
            scale,
            *query.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            out.stride(0),
            GROUP=group,
            SIZE=size,
            VALUE_SIZE=value_size,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=max(16, triton.next_power_of_2(size)),
            BLOCK_E=max(16, triton.next_power_of_2(value_size)),
            num_warps=WARPS,
            num_stages=2,
        )
    return out


def _align(x: Tensor) -> Tensor:
    """Return a contiguous tensor at an address for which Triton compiles the same kernel each time."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
