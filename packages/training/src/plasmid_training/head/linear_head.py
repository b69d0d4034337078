"""Chunked products with a linear head, which reuse one buffer for logits and accumulate gradients.

P positions, H hidden size, V vocabulary size (of this rank's shard), C positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from plasmid_models.kernels.invariant import product
from torch import Tensor

from ..estimates.activations import auto_chunk
from .vocab_shard import VocabShard

ChunkSize = Literal["auto"] | int


@dataclass(slots=True, eq=False)
class LinearHead:
    """Hidden states [P, H] and the head's weight [V, H] and bias [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    invariant: bool = False
    """Compute the logits with batch-invariant kernels."""
    _buffer: Tensor | None = field(default=None, init=False)

    def chunks(self, size: ChunkSize) -> list[slice]:
        """Split the positions; at least one chunk, even if empty: gradients of the head must exist on every rank."""
        length = len(self.hidden)
        step = self._auto() if size == "auto" else size
        return [slice(start, min(start + step, length)) for start in range(0, max(length, 1), step)]

    def _auto(self) -> int:
        length, row = len(self.hidden), max(1, len(self.weight)) * self.weight.element_size()
        return auto_chunk(length, row, on_gpu=self.weight.is_cuda)

    def logits(self, chunk: slice) -> Tensor:
        """Compute the logits [C, V] in a shared buffer; valid until the next call, and may be overwritten."""
        hidden = self.hidden[chunk]
        if self.invariant:
            return product(hidden, self.weight, self.bias)
        if self._buffer is None or len(self._buffer) < len(hidden):
            self._buffer = None  # free it before allocating the new one
            self._buffer = hidden.new_empty(len(hidden), len(self.weight))
        out = self._buffer[: len(hidden)]
        if self.bias is None:
            return torch.mm(hidden, self.weight.T, out=out)
        return torch.addmm(self.bias, hidden, self.weight.T, out=out)

    def release(self) -> None:
        """Free the buffer of the logits."""
        self._buffer = None


@dataclass(slots=True, eq=False)
class HeadGradients:
    """Gradients summed over chunks; those of weight and bias in at least fp32, because bf16 would round chunks away.

    On a CPU, the weight's gradient of a single chunk keeps the dtype of the product.
    """

    head: LinearHead
    needs: tuple[bool, bool, bool]
    """Which of hidden, weight and bias need a gradient."""
    hidden: Tensor | None = field(default=None, init=False)
    weight: Tensor | None = field(default=None, init=False)
    bias: Tensor | None = field(default=None, init=False)

    def add(self, chunk: slice, grad_logits: Tensor) -> None:
        """Accumulate the gradient [C, V] of one chunk's logits."""
        head, (needs_hidden, needs_weight, needs_bias) = self.head, self.needs
        if needs_hidden:
            if self.hidden is None:
                self.hidden = torch.empty_like(head.hidden)
            torch.mm(grad_logits, head.weight, out=self.hidden[chunk])
        if needs_weight:
            self.weight = _add_product(self.weight, grad_logits.T, head.hidden[chunk])
        if needs_bias and head.bias is not None:
            total = grad_logits.sum(0, dtype=_at_least_fp32(grad_logits))
            self.bias = total if self.bias is None else self.bias.add_(total)

    def sum_hidden(self, shard: VocabShard | None) -> None:
        """Sum the gradient of the hidden states over the shards of the vocabulary."""
        if shard is not None and self.hidden is not None:
            shard.sum(self.hidden)

    def finish(self, factor: Tensor | None = None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the dtypes of hidden, weight and bias, multiplied by a scalar."""
        head = self.head
        likes = (head.hidden, head.weight, head.bias)
        sums = (self.hidden, self.weight, self.bias)
        hidden, weight, bias = (_cast(total, like, factor) for total, like in zip(sums, likes, strict=True))
        return hidden, weight, bias


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right, in place if possible; a total of None is 0.

    The sum has at least fp32, and so has the first product if the matrix product can write fp32.
    """
    dtype = _at_least_fp32(left)
    if dtype != left.dtype and not (left.is_cuda and torch.version.hip is None):
        product = left @ right
        return product if total is None else total.to(dtype).add_(product)
    beta = 0 if total is None else 1
    if total is None:
        total = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
    if dtype == left.dtype:
        return total.addmm_(left, right, beta=beta)
    return torch.addmm(total, left, right, out_dtype=dtype, beta=beta, out=total)


def _cast(total: Tensor | None, like: Tensor | None, factor: Tensor | None) -> Tensor | None:
    if total is None or like is None:
        return None
    if factor is None:
        return total.to(like.dtype)
    return torch.mul(total, factor.to(_at_least_fp32(total)), out=torch.empty_like(like))
