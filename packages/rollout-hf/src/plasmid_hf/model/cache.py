"""KV cache with one slot per running request, filled from the front, so that attention reads views of it."""

from __future__ import annotations

from torch import Tensor

from .recurrent import SlotStates

ROWS = 8
"""From this number on, slots are added in multiples of it, so that the cache rarely grows."""


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


class SlotCache:
    """Keys and values of every layer as [slots, kv heads, tokens, head size]. Slots ``0:num_rows`` are in use.

    Heads of keys and values may have different sizes.
    """

    def __init__(self, *, num_layers: int, block: int, max_rows: int) -> None:
        self._num_layers = num_layers
        self.block = block
        """Number of tokens by which a row grows."""
        self._max_rows = max_rows
        self._shape = (0, 0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.states = SlotStates()
        """States of layers with linear attention; a slot has one per layer, of constant size."""

    def shape_for(self, rows: int, tokens: int) -> tuple[int, int]:
        """Return the number of slots and the tokens per slot that the cache allocates for this size."""
        slots = rows if rows < ROWS else min(round_up(rows, ROWS), self._max_rows)
        return slots, round_up(tokens, self.block)

    def tokens_for(self, rows: int, tokens: int) -> int:
        """Return the total number of tokens that the cache allocates for this size."""
        slots, length = self.shape_for(rows, tokens)
        return slots * length

    def reserve(self, rows: int, tokens: int) -> None:
        """Reserve room for ``rows`` rows of ``tokens`` tokens. Each layer grows when it is next used."""
        slots, length = self._shape
        if rows > slots or tokens > length:
            wanted = self.shape_for(rows, tokens)
            self._shape = (wanted[0], max(wanted[1], length if rows > slots else 0))

    @property
    def num_slots(self) -> int:
        """Number of slots that are reserved."""
        return self._shape[0]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer with the reserved room; heads, size and dtype are those of the
        arguments."""
        if not self.keys:
            self.keys, self.values = (
                [like.new_zeros(0, like.shape[-3], 0, like.shape[-1])] * self._num_layers for like in (key, value)
            )
        if self.keys[index].shape[0] != self._shape[0] or self.keys[index].shape[2] != self._shape[1]:
            self.keys[index] = self._resize(self.keys[index])
            self.values[index] = self._resize(self.values[index])
        return self.keys[index], self.values[index]

    def _resize(self, old: Tensor) -> Tensor:
        slots, length = self._shape
        # zeros, not empty: attention multiplies entries after a row's end by 0, and 0 x NaN is NaN
        new = old.new_zeros(slots, old.shape[1], length, old.shape[3])
        rows, tokens = min(slots, old.shape[0]), min(length, old.shape[2])
        new[:rows, :, :tokens] = old[:rows, :, :tokens]
        return new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot into another."""
        for tensor in (*self.keys, *self.values):
            if tensor.numel():  # layers with linear attention have none
                tensor[target, :, :length] = tensor[source, :, :length]
        self.states.move(source, target)

    def clear(self) -> None:
        """Clear the cache and free its memory, so that later results do not depend on earlier ones."""
        self.keys, self.values = [], []
        self.states.clear()
        self._shape = (0, 0)

    @property
    def num_bytes(self) -> int:
        """Return the bytes allocated for keys and values."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))
