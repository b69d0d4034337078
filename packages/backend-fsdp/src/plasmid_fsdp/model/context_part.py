"""One context-parallel rank's part of a decoder input, and the all-to-all before and after attention.

B rows of W tokens (B is 1 if samples are packed), C ranks, n tokens of each rank, h heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from plasmid_training.batches.context_parallel import join_heads, split_heads
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True, eq=False)
class ContextPart:
    """The n consecutive tokens of one rank out of the B * W, which are padded to C * n at the end."""

    group: dist.ProcessGroup
    rows: int
    """B"""
    width: int
    """W"""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all ranks, B * W."""
        return self.rows * self.width

    @property
    def size(self) -> int:
        """Number of tokens of each rank, n."""
        return -(-self.num_tokens // self.group.size())

    @property
    def start(self) -> int:
        """Index of the first token of this rank among the B * W."""
        return self.group.rank() * self.size

    def of(self, tokens: Tensor, *, padding: int = 0) -> Tensor:
        """Return the part [n, ...] of values [B * W, ...] of all tokens."""
        own = tokens[self.start : self.start + self.size]
        return pad(own, (0, 0) * (own.ndim - 1) + (0, self.size - len(own)), value=padding)

    def gather_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange [1, h, n, d] of this rank's tokens for [B, h / C, W, d] of its heads; likewise key and value."""
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        parts = split_heads(query, key, value, self.group)
        query, key, value = (self._shape(x[: self.num_tokens]).transpose(1, 2) for x in parts)
        return query, key, value

    def select_heads(self, x: Tensor) -> Tensor:
        """Return the values [h / C] of this rank's heads out of [h]."""
        return x.chunk(self.group.size())[self.group.rank()]

    def scatter_tokens(self, out: Tensor) -> Tensor:
        """Exchange [B, W, h / C, d] of this rank's heads for [1, n, h, d] of its tokens; 0 for padding."""
        out = out.flatten(0, 1)
        return join_heads(pad(out, (0, 0, 0, 0, 0, self.group.size() * self.size - len(out))), self.group)[None]

    def _shape(self, x: Tensor) -> Tensor:
        return x.view(self.rows, self.width, *x.shape[1:])


def split_arguments(arguments: dict[str, Any], group: dist.ProcessGroup) -> tuple[dict[str, Any], ContextPart]:
    """Return this rank's part of a decoder's arguments; `packed_attention` gets the others for the whole rows."""
    part = ContextPart(group, *arguments["input_ids"].shape)
    own = {name: part.of(arguments[name].flatten())[None] for name in ("input_ids", "position_ids")}
    return arguments | own | {"context_part": part}, part
