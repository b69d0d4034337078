"""Linear layers of Megatron with a low-rank adapter, which are one or several layers of the model folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from plasmid_models.lora.layers import Merge
from torch import Tensor, nn

from ..weights.bridge import Architecture
from ..weights.placement import ADAPTER_PREFIX
from ..weights.shards import ADAPTER, LAYER, Weight, hf_names, is_split, row_index, split
from .layers import LowRank, attach

ORDER = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a decoder layer that can have an adapter, in the order of transformers' models."""
Read = Callable[[str], Tensor | None]
"""Function that returns the matrix of the model folder with a name, or None for zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """A linear layer of Megatron on any rank, which consists of one or several layers of the model folder."""

    name: str
    """mbridge's name of its weight."""
    shape: tuple[int, int]
    """Shape of the whole weight."""
    layers: tuple[str, ...]
    """Names of the folder's layers; later only of those with an adapter."""

    @property
    def position(self) -> tuple[int, int]:
        """Position in the model."""
        number = LAYER.search(self.name)
        assert number is not None, "only decoder layers have linear layers"
        return int(number[1]), next(index for index, kind in enumerate(ORDER) if kind in self.name)

    def rows(self, architecture: Architecture) -> dict[str, Tensor]:
        """Return the rows of the whole weight that each of the folder's layers consists of, in its order."""
        found = row_index(architecture, self.name, self.shape[0])
        return {layer: found[f"{layer}.weight"] for layer in self.layers}


def is_linear(weight: Weight) -> bool:
    """Return True for the weight of a linear layer that can have an adapter."""
    is_layer = LAYER.search(weight.name) is not None and weight.expert is None
    return is_layer and weight.name.endswith(tuple(f"{kind}.weight" for kind in ORDER))


def describe_linear(module: nn.Module, weight: Weight, architecture: Architecture) -> FusedLinear:
    """Return the description of the linear layer ``module`` with this weight."""
    layers = tuple(name.removesuffix(".weight") for name in hf_names(architecture, weight.name))
    shape = (module.output_size, module.input_size)
    return FusedLinear(name=weight.name, shape=shape, layers=layers)  # type: ignore[arg-type]


class AdaptedLinear:
    """A linear layer of this rank and its adapter."""

    in_expert_group = False

    def __init__(
        self,
        module: nn.Module,
        base: Weight,
        linear: FusedLinear,
        architecture: Architecture,
        *,
        rank: int,
        scale: float,
    ) -> None:
        """Insert the adapter into ``module``, which has the weight ``base``."""
        self._base, self._linear = base, linear
        self._rows = linear.rows(architecture)
        parts = torch.zeros(linear.shape[0], len(linear.layers))
        for index, rows in enumerate(self._rows.values()):
            parts[rows, index] = 1.0
        is_fused = parts.numel() > linear.shape[0] or not bool(parts.all())
        if base.tensor.partition_dim == 0:  # type: ignore[attr-defined]
            parts = split(base.name, parts, base)
        self.module = LowRank(module, rank=rank, scale=scale, parts=parts if is_fused else None)
        self.layers = linear.layers
        attach(module, self.module)

    def matrix(self, kind: str) -> Weight:
        """Return ``lora_A`` or ``lora_B`` of this rank."""
        base = self._base
        name = base.name.removesuffix("weight") + kind
        own_name = base.own_name.removesuffix(".weight") + ADAPTER + kind
        return replace(base, name=name, own_name=own_name, tensor=getattr(self.module, kind))

    def merges(self) -> Iterator[tuple[str, Merge]]:
        """Yield each weight's name and the function that merges the adapter into it."""
        yield self._base.name, self.module.merge_into

    def copy(self, read: Read) -> None:
        """Set A and B to this rank's parts of the whole matrices of the folder's layers."""
        a, b = self.matrix("lora_A"), self.matrix("lora_B")
        whole = torch.cat([_require(read(f"{name}.lora_A")) for name in self.layers])
        a.tensor.copy_(split(a.name, whole, a))
        whole = torch.zeros(self._linear.shape[0], b.tensor.shape[1])
        for name, rows in self._rows.items():
            found = read(f"{name}.lora_B")
            if found is not None:
                whole[rows] = found.float()
        b.tensor.copy_(split(b.name, whole, b))

    def to_hf(self, kind: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of the folder's layers in a whole one in Megatron's layout."""
        for (layer, rows), a in zip(self._rows.items(), whole.chunk(len(self._rows)), strict=True):
            part = a if kind == "lora_A" else whole[rows.to(whole.device)]
            yield f"{layer}.{kind}", part.contiguous()

    def sharded(self, weight: Weight) -> ShardedBase:
        """Return a `matrix` for a checkpoint in Megatron's distributed format."""
        dims = {weight.name: weight.tensor.partition_dim} if is_split(weight) else {}  # type: ignore[attr-defined]
        state = make_sharded_tensors_for_checkpoint(
            {weight.name: weight.tensor},
            ADAPTER_PREFIX,
            dims,
            tp_group=mpu.get_tensor_model_parallel_group(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        )
        found: ShardedBase = state[ADAPTER_PREFIX + weight.name]
        # gate and up are split separately
        is_halved = "linear_fc1" in weight.name and weight.name.endswith("lora_B")
        return apply_swiglu_sharded_factory(found, ()) if is_halved else found


def _require(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every layer has a matrix A"
    return tensor.float()
