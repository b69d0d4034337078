"""Routed experts of Megatron with low-rank adapters: A and B of the experts of this rank, stacked by projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from plasmid.errors import ModelError
from plasmid_models.lora.experts import LoRAExperts, Projection
from plasmid_models.lora.layers import Merge
from torch import Tensor, nn

from ..model.experts import FUSED, GroupedExperts, mark_experts
from ..shapes import expert_split_error
from ..weights.bridge import Architecture
from ..weights.placement import ADAPTER_PREFIX
from ..weights.shards import ADAPTER, STACKED, Weight, experts_per_rank, hf_names, row_index
from .linear import Read

OWN = f"{STACKED}local_experts."


def find_experts(chunk: nn.Module, weight: Weight) -> GroupedExperts | None:
    """Return the experts that have this weight if they can have an adapter, else None."""
    if weight.expert is None or OWN not in weight.own_name:
        return None
    module = chunk.get_submodule(weight.own_name.partition(OWN)[0] + STACKED.rstrip("."))
    return module if isinstance(module, GroupedExperts) and module.is_plain else None


def describe_experts(weight: Weight, architecture: Architecture) -> list[Projection]:
    """Return the projections that Megatron fuses in the weight of an expert."""
    experts = range(architecture.config.num_moe_experts or 0)
    names = [hf_names(architecture, f"{weight.name}{expert}") for expert in experts]
    rows = row_index(architecture, f"{weight.name}0", len(weight.tensor))
    return [
        Projection(
            experts=of_projection[0].partition(".experts.")[0] + ".experts",
            fused=next(fused for own, fused in FUSED.items() if own in weight.name),
            rows=slice(int(rows[of_projection[0]][0]), int(rows[of_projection[0]][-1]) + 1),
            size=weight.tensor.shape[1],
            layers=tuple(name.removesuffix(".weight") for name in of_projection),
        )
        for of_projection in zip(*names, strict=True)
    ]


def check_expert_split() -> None:
    """Raise `ModelError` if the matrices of experts are split; `check_split` only knows built-in families."""
    size = mpu.get_expert_tensor_parallel_world_size()
    if size > 1:
        raise ModelError(expert_split_error(size))


class AdaptedExperts:
    """A projection of the routed experts of this rank and its adapter. E experts of this rank."""

    def __init__(
        self,
        experts: GroupedExperts,
        base: Weight,
        projection: Projection,
        architecture: Architecture,
        *,
        rank: int,
        scale: float,
    ) -> None:
        """Insert the adapter into ``experts``; ``base`` is the weight of one of them."""
        self._base, self._whole = base, projection
        self._per_rank = experts_per_rank(architecture)
        self._first = mpu.get_expert_model_parallel_rank() * self._per_rank
        self.layers = projection.layers[self._first : self._first + self._per_rank]
        own = replace(projection, layers=self.layers)
        device = base.tensor.device
        self.module = LoRAExperts(own, rank=rank, scale=scale, dtype=torch.float32, device=device)
        for parameter in self.module.parameters():
            mark_experts(parameter, experts.config)
        self.in_expert_group = not self.module.lora_A.allreduce  # type: ignore[attr-defined]
        experts.adapter[projection.kind] = self.module

    def matrix(self, kind: str) -> Weight:
        """Return ``lora_A`` or ``lora_B`` of this rank, [E, ...]."""
        own_name = self._base.own_name.partition(OWN)[0] + f"{STACKED.rstrip('.')}{ADAPTER}{self._whole.kind}.{kind}"
        name = self._base.name.partition(STACKED)[0] + f"{STACKED}{self._whole.kind}.{kind}"
        return Weight(name=name, own_name=own_name, tensor=getattr(self.module, kind), expert=None, is_stacked=True)

    def merges(self) -> Iterator[tuple[str, Merge]]:
        """Yield the name of each expert's weight and the function that merges the adapter into it."""
        for index in range(self._per_rank):
            yield f"{self._base.name}{self._first + index}", partial(self._merge_into, index)

    def _merge_into(self, index: int, weight: Tensor) -> Tensor:
        a, b = (getattr(self.module, kind).detach()[index, None] for kind in ("lora_A", "lora_B"))
        return self.module.merge_into(weight[None], a, b)[0]

    def copy(self, read: Read) -> None:
        """Set A and B to the matrices of the folder's layers."""
        for kind in ("lora_A", "lora_B"):
            for own, layer in zip(getattr(self.module, kind), self.layers, strict=True):
                found = read(f"{layer}.{kind}")
                own.zero_() if found is None else own.copy_(found)

    def to_hf(self, kind: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of the folder's layers in the stacked ones of all ranks."""
        for layer, own in zip(self._whole.layers, whole, strict=True):
            yield f"{layer}.{kind}", own

    def sharded(self, weight: Weight) -> ShardedBase:
        """Return a `matrix` for a checkpoint in Megatron's distributed format."""
        rank, size = mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()
        return ShardedTensor.from_rank_offsets(
            ADAPTER_PREFIX + weight.name,
            weight.tensor,
            (0, rank, size),
            replica_id=(0, 0, mpu.get_expert_data_parallel_rank()),
        )
