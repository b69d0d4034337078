"""Low-rank adapters of Megatron's linear layers. T tokens, n layers of the model folder that Megatron fuses into one.

Column layers split their output over the tensor-parallel ranks: A is whole on every rank, B split by rows. Row layers
split their input: A is split by columns, B whole. Only the [T, n r] product with A is communicated.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from plasmid_models.lora.layers import merge
from torch import Tensor, nn
from torch.nn.functional import linear

from ..weights.shards import ADAPTER

NAME = ADAPTER.strip(".")
"""Name of the adapter in its linear layer."""


class LowRank(nn.Module):
    """``scale * x A^T B^T``, the part of the adapter in one linear layer of this rank."""

    _parts: Tensor | None

    def __init__(self, base: nn.Module, *, rank: int, scale: float, parts: Tensor | None) -> None:
        """Create A and B as fp32 zeros on the device of the weight of ``base``.

        ``parts`` [out, n] is 1 where a row of the weight on this rank belongs to one of the n layers with an adapter;
        None if all rows belong to one.
        """
        super().__init__()
        assert isinstance(base, ColumnParallelLinear | RowParallelLinear), "other layers have no adapter"
        self.scale, self.is_on = scale, True
        self._splits_input = isinstance(base, RowParallelLinear)
        self._group, self._splits_sequence = base.tp_group, bool(base.sequence_parallel)
        out, size = base.weight.shape
        count = 1 if parts is None else parts.shape[1]
        options: dict[str, Any] = {"dtype": torch.float32, "device": base.weight.device}
        self.lora_A = nn.Parameter(torch.zeros(count * rank, size, **options))
        self.lora_B = nn.Parameter(torch.zeros(out, rank, **options))
        self.register_buffer("_parts", None if parts is None else parts.to(**options), persistent=False)
        split, whole = (self.lora_A, self.lora_B) if self._splits_input else (self.lora_B, self.lora_A)
        if self._group.size() > 1:
            split.tensor_model_parallel = True  # type: ignore[attr-defined]
            split.partition_dim = int(self._splits_input)  # type: ignore[attr-defined]
            split.partition_stride = 1  # type: ignore[attr-defined]
        # each rank then has different tokens: Megatron sums the gradients
        whole.sequence_parallel = self._splits_sequence  # type: ignore[attr-defined]
        for parameter in (self.lora_A, self.lora_B):
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return the term [T, 1, out] for the input [T, 1, in] of the linear layer."""
        hidden = self._communicate(linear(x, self.lora_A.to(x.dtype)))
        return self.scale * linear(hidden, self._factor().to(x.dtype))

    def merge_into(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the merged weight, in fp32 or better."""
        return merge(weight, self.lora_A.detach(), self._factor().detach(), self.scale)

    def _factor(self) -> Tensor:
        """Return B [out, n r] with zeros in the columns of other layers than the row's."""
        if self._parts is None:
            return self.lora_B
        return (self.lora_B[:, None] * self._parts[:, :, None]).flatten(1)

    def _communicate(self, hidden: Tensor) -> Tensor:
        """Return the product with the whole A for the tokens of this rank's output."""
        found: Tensor = hidden
        if self._group.size() == 1:
            pass
        elif self._splits_input and self._splits_sequence:
            found = reduce_scatter_to_sequence_parallel_region(hidden, group=self._group)
        elif self._splits_input:
            found = reduce_from_tensor_model_parallel_region(hidden, group=self._group)
        elif self._splits_sequence:
            found = gather_from_sequence_parallel_region(hidden, group=self._group)
        else:
            found = copy_to_tensor_model_parallel_region(hidden, group=self._group)
        return found


def attach(base: nn.Module, adapter: LowRank) -> None:
    """Add the adapter's term to the outputs of a linear layer, before these are normalized."""
    base.add_module(NAME, adapter)
    base.register_forward_hook(_add_term, prepend=True)


def _add_term(base: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    adapter = getattr(base, NAME)
    out, bias = outputs
    return (out + adapter(inputs[0]) if adapter.is_on else out), bias
