"""The KV cache: one slot for each running request, filled from the front, so that attention reads views of it."""

from __future__ import annotations

from torch import Tensor

ROWS = 8
"""From this number on slots are added in multiples of it, so that growing is rare."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least ``value``."""
    return -(-value // multiple) * multiple


class SlotCache:
    """Keys and values of every layer as [slots, kv heads, tokens, head size]. Slots ``0:num_rows`` are in use.

    Heads of keys and of values may have different sizes.
    """

    def __init__(self, *, num_layers: int, block: int, max_rows: int) -> None:
        self._num_layers = num_layers
        self.block = block
        """Tokens that a row grows by."""
        self._max_rows = max_rows
        self._shape = (0, 0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def shape_for(self, rows: int, tokens: int) -> tuple[int, int]:
        """Slots and tokens of each that the cache takes to hold this."""
        slots = rows if rows < ROWS else min(round_up(rows, ROWS), self._max_rows)
        return slots, round_up(tokens, self.block)

    def tokens_for(self, rows: int, tokens: int) -> int:
        """Tokens of memory that the cache takes to hold this."""
        slots, length = self.shape_for(rows, tokens)
        return slots * length

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for this many rows of this many tokens; takes effect in each layer when it is next used."""
        slots, length = self._shape
        if rows > slots or tokens > length:
            wanted = self.shape_for(rows, tokens)
            self._shape = (wanted[0], max(wanted[1], length if rows > slots else 0))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer with the reserved room; the rest is as in these, [..., heads, tokens, size]."""
        if not self.keys:
            self.keys, self.values = (
                [like.new_zeros(0, like.shape[-3], 0, like.shape[-1])] * self._num_layers for like in (key, value)
            )
        if self.keys[index].shape[0] != self._shape[0] or self.keys[index].shape[2] != self._shape[1]:
            self.keys[index] = self._resized(self.keys[index])
            self.values[index] = self._resized(self.values[index])
        return self.keys[index], self.values[index]

    def _resized(self, old: Tensor) -> Tensor:
        slots, length = self._shape
        # zeros, not empty: attention multiplies what lies behind a row's end by 0, and 0 x NaN is NaN
        new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
        rows, tokens = min(slots, old.shape[0]), min(length, old.shape[2])
        new[:rows, :, :tokens] = old[:rows, :, :tokens]
        return new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot into another."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear(self) -> None:
        """Forget everything and free the memory, so that what follows does not depend on what was before."""
        self.keys, self.values = [], []
        self._shape = (0, 0)

    @property
    def num_bytes(self) -> int:
        """Memory in use."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
