"""Estimates of activation memory. Imports no torch.

The counts are those of a decoder layer with packed attention; which tensors are kept for the backward pass was
determined from peak memory measured on an H200 (`docs/design/plan.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from plasmid.types.estimates import BatchLoad
from plasmid_models.estimates.shape import ModelShape
from plasmid_models.linear_attention import CHUNK

GPU_BYTES = 1280 * 2**20
CPU_BYTES = 128 * 2**20
"""Maximum bytes of a chunk's logits with ``auto``, without the fp32 gradient of the weight; more is not faster."""
DENSE_FROM, MAX_PADDING = 2048, 0.1
"""Minimum mean length and maximum padding fraction of samples in a dense block (`batches/packed_attention.py`)."""
TILE = 128
"""Chunk sizes of ``auto`` are multiples of this, for efficient matrix products."""


def auto_chunk(length: int, row_bytes: int, *, on_gpu: bool) -> int:
    """Return the chunk size for ``length`` positions whose logits take ``row_bytes`` each."""
    most = max(1, (GPU_BYTES if on_gpu else CPU_BYTES) // row_bytes)
    most = max(1, most // TILE) * TILE
    num_chunks = max(1, -(-length // most))
    return max(1, -(-length // (num_chunks * TILE))) * TILE  # chunks of about equal size


Attention = Literal["packed", "dense"]


def has_dense_blocks(load: BatchLoad) -> bool:
    """Return True if a GPU computes attention over dense blocks: samples are long and of similar length."""
    return load.sample_tokens >= DENSE_FROM and load.longest <= (1 + MAX_PADDING) * load.sample_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Activation memory of a model's layers."""

    shape: ModelShape
    dtype_bytes: int
    compiled: bool
    """Compiled layers keep no intermediate values of normalizations, rotary embeddings and activation functions."""
    attention: Attention = "packed"
    """The packed kernels of torch 2.11 keep keys and values repeated for every query head; dense ones share them."""
    extra: float = 0.0
    """Additional elements kept per token and layer, in multiples of the hidden size."""
    budget: float = 1.0
    """Fraction of the activations other than a layer's input that is kept."""

    @property
    def numbers(self) -> float:
        """Elements that one layer with softmax attention keeps per token."""
        shape = self.shape
        normed = shape.query + shape.keys if shape.has_head_norm else 0
        repeated = self.attention == "packed"
        keys = 2 * shape.query if repeated else 2 * shape.keys
        kept = normed + shape.query + shape.value + keys
        if not self.compiled:
            kept += self._copies * normed
            kept += normed + shape.value if shape.has_output_gate else 0
        return self._with_mlp(kept)

    @property
    def linear_numbers(self) -> float:
        """Elements that one layer with linear attention keeps per token, if transformers computes it in PyTorch."""
        net = self.shape.net
        if net is None:
            return 0.0
        keys = net.heads * net.key_size  # repeated for every head
        exact = 5 * CHUNK * net.heads + 6 * net.values + 8 * keys + net.state / CHUNK
        return self._with_mlp(2 * net.convolved + 3 * net.values + exact * 4 / self.dtype_bytes)

    @property
    def _copies(self) -> int:
        """Size of a value in fp32, in which norms compute, in elements of the model's dtype."""
        return 2 if self.dtype_bytes == 2 else 1

    def _with_mlp(self, of_attention: float) -> float:
        """Add the elements of a layer's norms, residuals and MLP to those of its attention."""
        shape = self.shape
        kept = of_attention + 4 * shape.hidden + 3 * shape.inner
        kept += 2 * shape.routed * shape.hidden  # inputs and outputs of experts
        if not self.compiled:  # norms of families with a gate multiply in fp32, too
            kept += shape.inner + (2 if shape.has_output_gate else 1) * self._copies * 2 * shape.hidden
        return shape.hidden + self.budget * (kept + (self.extra - 1) * shape.hidden)

    def layer(self, tokens: float) -> float:
        """Return the bytes that the largest layer keeps."""
        return tokens * max(self.numbers, self.linear_numbers) * self.dtype_bytes

    def layers(self, tokens: float) -> float:
        """Return the bytes that all layers keep."""
        shape = self.shape
        numbers = shape.attending * self.numbers + shape.linear * self.linear_numbers
        return tokens * numbers * self.dtype_bytes

    def boundaries(self, tokens: float, layers: float) -> float:
        """Return the bytes of the layers' inputs, which are all that is kept with recomputation."""
        return layers * tokens * self.shape.hidden * self.dtype_bytes


def head_memory(
    shape: ModelShape,
    tokens: float,
    *,
    dtype_bytes: int,
    chunk: int | None,
    trained: bool,
    parts: int = 1,
    on_gpu: bool = True,
) -> dict[str, float]:
    """Return the bytes of the log-probability head: logits of a chunk, fp32 gradient of the weight, hidden states.

    ``parts`` is the number of ranks that the vocabulary is split over; ``chunk`` is None for the default.
    """
    vocab, longest = shape.vocab // parts, math.ceil(tokens)
    rows = min(longest, auto_chunk(longest, vocab * dtype_bytes, on_gpu=on_gpu) if chunk is None else chunk)
    return {
        "logits": rows * vocab * dtype_bytes + (4 * vocab * shape.hidden if trained else 0),
        "hidden states": 3 * tokens * shape.hidden * dtype_bytes,
    }
