"""States of layers with linear attention (gated delta nets of Qwen3-Next and Qwen3.5), one per running request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from plasmid_models.linear_attention import LINEAR
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

PARTS = ("conv_states", "recurrent_states")
"""Attributes of a cache layer in transformers: last inputs of the convolution, and state of the recurrence."""


class SlotStates:
    """Recurrent states as [slots, ...], by layer and part. Empty for models without such layers."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, str], Tensor] = {}

    def write(self, layer: int, part: str, slots: Tensor, values: Tensor, *, num_slots: int) -> None:
        """Store the states [n, ...] of n slots. Allocates memory for ``num_slots`` slots in total."""
        known = self._tensors.get((layer, part))
        if known is None or len(known) < num_slots:
            grown = values.new_zeros(num_slots, *values.shape[1:])
            if known is not None:
                grown[: len(known)] = known
            self._tensors[layer, part] = known = grown
        known[slots] = values

    def view(self, layer: int, part: str, rows: int) -> Tensor:
        """Return the states of the slots ``0:rows``."""
        return self._tensors[layer, part][:rows]

    def move(self, source: int, target: int) -> None:
        """Copy the states of one slot into another."""
        for tensor in self._tensors.values():
            tensor[target] = tensor[source]

    def clear(self) -> None:
        """Free the memory."""
        self._tensors.clear()

    def layers(self) -> set[int]:
        """Return the layers that have states."""
        return {layer for layer, _ in self._tensors}

    @property
    def num_bytes(self) -> int:
        """Return the allocated bytes."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


class StateCache(Cache):
    """Cache of one forward pass, with the interface that linear attention layers of transformers expect.

    It is empty for layers with softmax attention: `Plan` stores their keys and values.
    """

    def __init__(self, kinds: Sequence[str], states: SlotStates | None = None, *, rows: int = 0) -> None:
        """Start from empty states, or from ``states`` of the slots ``0:rows``, which the pass then updates."""
        layers: list[Any] = [_StateLayer() if kind == LINEAR else _NoCache() for kind in kinds]  # type: ignore[no-untyped-call]
        super().__init__(layers=layers)
        for index, layer in enumerate(layers):
            if states is not None and isinstance(layer, _StateLayer):
                layer.continue_from([states.view(index, part, rows) for part in PARTS])

    def store(self, states: SlotStates, slots: Sequence[Tensor], *, num_slots: int) -> None:
        """Copy the final state of row i into the slots ``slots[i]``."""
        rows = torch.cat([torch.full_like(own, i) for i, own in enumerate(slots)])
        for index, layer in enumerate(self.layers):
            if isinstance(layer, _StateLayer):
                for part in PARTS:
                    states.write(index, part, torch.cat(list(slots)), layer.get(part)[rows], num_slots=num_slots)


class _StateLayer(LinearAttentionLayer):
    def continue_from(self, parts: Sequence[Tensor]) -> None:
        """Use these tensors as the states, in place."""
        for part, tensor in zip(PARTS, parts, strict=True):
            self._set(part, tensor)
            self._set(f"is_{part}_initialized", True)
        self._set("has_previous_state", True)
        self._set("conv_kernel_size", parts[0].shape[-1])

    def get(self, part: str) -> Tensor:
        known = getattr(self, part)
        found: Tensor = known[0] if isinstance(known, dict) else known
        return found

    def _set(self, name: str, value: Any) -> None:
        """Set an attribute, which later releases of transformers keep in a dict."""
        known = getattr(self, name, None)
        if isinstance(known, dict):
            known[0] = value
        else:
            setattr(self, name, value)

    def update_recurrent_state(self, recurrent_states: Tensor, *unused: Any, **options: Any) -> Tensor:
        """Keep the state in its own dtype, fp32; transformers 5.12 rounds it to that of the convolution."""
        if self.get("recurrent_states") is None:
            self._set("recurrent_states", recurrent_states)
        else:
            self.get("recurrent_states").copy_(recurrent_states)
        return recurrent_states


class _NoCache(CacheLayerMixin):  # type: ignore[no-untyped-call]
    def lazy_initialization(self, *unused: Any, **options: Any) -> None:
        """Do nothing: there is no cache to initialize."""

    def update(self, key_states: Tensor, value_states: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the arguments unchanged."""
        return key_states, value_states

    def get_mask_sizes(self, *unused: Any) -> tuple[int, int]:
        """Never called: the engine's attention takes no mask of transformers."""
        raise NotImplementedError

    def get_seq_length(self) -> int:
        """Return 0: the engine passes positions explicitly."""
        return 0

    def get_max_cache_shape(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1
