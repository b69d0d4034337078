"""The adapter of a policy that is split over ranks. Implements `plasmid_training.rank.backend.Adapter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from plasmid.errors import ModelError
from plasmid_models.lora.layers import draw_matrices, fingerprint
from plasmid_models.lora.peft_folder import adapter_config, read_adapter_tensors
from plasmid_models.lora.targets import KEY, match_targets
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.lora_settings import LoRASettings
from torch import Tensor, nn

from ..weights.bridge import Architecture
from ..weights.gathering import Gatherer
from ..weights.placement import ADAPTER_PREFIX
from ..weights.shards import ADAPTER, LAYER, Weight, experts_per_rank, hf_names, is_split, row_index, split, weights
from .layers import LowRank, attach

ORDER = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Linear layers of a decoder layer, except experts, in the order of transformers' models."""
MATRICES = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLinear:
    """A linear layer of Megatron on any rank, which is one or several layers of the model folder."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdaptedLinear:
    """A linear layer of this rank and its adapter."""

    linear: FusedLinear
    base: Weight
    module: LowRank

    def matrix(self, kind: str) -> Weight:
        """Return ``lora_A`` or ``lora_B`` of this rank."""
        base = self.base
        name = base.name.removesuffix("weight") + kind
        own_name = base.own_name.removesuffix(".weight") + ADAPTER + kind
        return replace(base, name=name, own_name=own_name, tensor=getattr(self.module, kind))


class ParallelAdapter:
    """fp32 LoRA matrices of a frozen language model, split over the ranks like the layers that they belong to."""

    def __init__(
        self, chunks: Sequence[nn.Module], architecture: Architecture, settings: LoRASettings, source: Source
    ) -> None:
        """Freeze the model and insert the adapter. All ranks create it together. Raises `ModelError`."""
        self._architecture, self._settings = architecture, settings
        own: dict[str, tuple[nn.Module, Weight]] = {}
        others: list[str] = []
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                # else a recomputed first layer has no gradient, and a compiled one needs its own graphs
                chunk.embedding.register_forward_hook(_require_grad)  # type: ignore[union-attr]
            for weight in weights([chunk]):
                if _is_linear(weight):
                    own[weight.name] = chunk.get_submodule(weight.own_name.removesuffix(".weight")), weight
                else:
                    name = weight.full_name(mpu.get_expert_model_parallel_rank(), experts_per_rank(architecture))
                    others += hf_names(architecture, name)
        linear = [self._describe(*found) for found in own.values()]
        self._linear, self._selected = _select(_of_all_stages(linear), _of_all_stages(others), settings)
        self.layers = [self._insert(*own[one.name], one) for one in self._selected if one.name in own]
        """Layers of this rank with an adapter."""
        if not all(_of_all_stages([bool(self.layers)])):
            # Megatron cannot save an optimizer without weights
            raise ModelError(
                f"{KEY}: some pipeline ranks have no layer with an adapter; choose layers of all, or lower "
                "trainer.pipeline_parallel"
            )
        self.base = {"path": str(source.path), "sha256": fingerprint(source.where, source.path)}
        """Folder of the base and a hash of its content."""

    def _describe(self, module: nn.Module, weight: Weight) -> FusedLinear:
        names = hf_names(self._architecture, weight.name)
        layers = tuple(name.removesuffix(".weight") for name in names)
        shape = (module.output_size, module.input_size)
        return FusedLinear(name=weight.name, shape=shape, layers=layers)  # type: ignore[arg-type]

    def _insert(self, module: nn.Module, weight: Weight, linear: FusedLinear) -> AdaptedLinear:
        parts = torch.zeros(linear.shape[0], len(linear.layers))
        for index, rows in enumerate(linear.rows(self._architecture).values()):
            parts[rows, index] = 1.0
        is_fused = parts.numel() > linear.shape[0] or not bool(parts.all())
        if weight.tensor.partition_dim == 0:  # type: ignore[attr-defined]
            parts = split(weight.name, parts, weight)
        spec = self._settings.spec()
        adapter = LowRank(module, rank=spec.rank, scale=spec.scale, parts=parts if is_fused else None)
        attach(module, adapter)
        return AdaptedLinear(linear=linear, base=weight, module=adapter)

    def matrices(self) -> list[Weight]:
        """Return A and B of this rank's layers."""
        return [layer.matrix(kind) for layer in self.layers for kind in MATRICES]

    @contextmanager
    def disable(self) -> Iterator[None]:
        for layer in self.layers:
            layer.module.is_on = False
        try:
            yield
        finally:
            for layer in self.layers:
                layer.module.is_on = True

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        return self._gatherer.tensors(dtype=dtype, device=device)

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        return self._gatherer.gatherables(dtype)

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        return self._gatherer.shares(rounds, dtype=dtype, device=device)

    def config(self, base: str) -> dict[str, Any]:
        adapted = [layer for linear in self._selected for layer in linear.layers]
        return adapter_config(self._settings.spec(), base=base, adapted=adapted, linear=self._linear)

    def merge(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Return a function per adapted weight of this rank that merges the adapter into it; none if it is off."""
        return {layer.base.name: layer.module.merge_into for layer in self.layers if layer.module.is_on}

    @torch.no_grad()
    def fill(self, *, seed: int) -> None:
        """Load `start_from`, or initialize A like PyTorch's linear layers and B to 0: the policy equals the base.

        The result is the same for any parallel layout, and for trainer 'fsdp'. Raises `ModelError`.
        """
        if self._settings.start_from != "none":
            self._read(Path(self._settings.start_from))
            return
        rank = self._settings.rank
        layers = {layer: linear.shape[1] for linear in self._selected for layer in linear.layers}
        drawn = draw_matrices(((rank, size) for size in layers.values()), seed=seed)
        own = {layer for adapted in self.layers for layer in adapted.linear.layers}
        found = {f"{layer}.lora_A": a for layer, a in zip(layers, drawn, strict=True) if layer in own}
        self._copy(found.get)

    def _read(self, folder: Path) -> None:
        rank, shapes = self._settings.rank, dict[str, tuple[int, ...]]()
        for linear in self._selected:
            for layer, rows in linear.rows(self._architecture).items():
                shapes[f"{layer}.lora_A.weight"] = rank, linear.shape[1]
                shapes[f"{layer}.lora_B.weight"] = len(rows), rank
        with read_adapter_tensors(folder, shapes) as saved:
            self._copy(lambda name: saved[f"{name}.weight"][...])

    def _copy(self, read: Callable[[str], Tensor | None]) -> None:
        """Set A and B of this rank to its parts of the whole matrices of the folder's layers; None is read as zeros."""
        for layer in self.layers:
            a, b = layer.matrix("lora_A"), layer.matrix("lora_B")
            whole = torch.cat([_existing(read(f"{name}.lora_A")) for name in layer.linear.layers])
            a.tensor.copy_(split(a.name, whole, a))
            whole = torch.zeros(layer.linear.shape[0], self._settings.rank)
            for name, rows in layer.linear.rows(self._architecture).items():
                found = read(f"{name}.lora_B")
                if found is not None:
                    whole[rows] = found.float()
            b.tensor.copy_(split(b.name, whole, b))

    def sharded_state(self) -> dict[str, ShardedBase]:
        """Return A and B of this rank for a checkpoint in Megatron's distributed format, by `Weight.name`."""
        own = {weight.name: weight for weight in self.matrices()}
        dims = {name: own[name].tensor.partition_dim for name in own if is_split(own[name])}  # type: ignore[attr-defined]
        state = make_sharded_tensors_for_checkpoint(
            {name: weight.tensor for name, weight in own.items()},
            ADAPTER_PREFIX,
            dims,
            tp_group=mpu.get_tensor_model_parallel_group(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        )
        found = {name: state[ADAPTER_PREFIX + name] for name in own}
        # gate and up are split separately
        halves = [name for name in own if "linear_fc1" in name and name.endswith("lora_B")]
        return found | {name: apply_swiglu_sharded_factory(found[name], ()) for name in halves}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what was read for `sharded_state`."""
        for weight in self.matrices():
            weight.tensor.copy_(state[weight.name])

    @cached_property
    def _gatherer(self) -> Gatherer:
        return Gatherer(self.matrices(), self._architecture, convert=self._to_hf)

    def _to_hf(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of the folder's layers in a whole one in Megatron's layout."""
        base, _, kind = name.rpartition(".")
        linear = next(layer.linear for layer in self.layers if layer.base.name == f"{base}.weight")
        rows = linear.rows(self._architecture)
        for layer, a in zip(rows, whole.chunk(len(rows)), strict=True):
            part = a if kind == "lora_A" else whole[rows[layer].to(whole.device)]
            yield f"{layer}.{kind}", part.contiguous()


def _is_linear(weight: Weight) -> bool:
    """Return True for the weight of a layer that can have an adapter."""
    is_layer = LAYER.search(weight.name) is not None and weight.expert is None
    return is_layer and weight.name.endswith(tuple(f"{kind}.weight" for kind in ORDER))


def _select(
    linear: list[FusedLinear], others: list[str], settings: LoRASettings
) -> tuple[list[str], list[FusedLinear]]:
    """Return the names of all linear layers of the folder, and Megatron's layers that get an adapter."""
    linear = sorted(linear, key=lambda one: one.position)
    names = [layer for one in linear for layer in one.layers]
    chosen: Sequence[str] = names
    if settings.targets:
        biases = {f"{name}.bias" for name in names}
        others = [name for name in others if name not in biases]
        experts = {name for name in others if ".experts." in name}
        chosen = match_targets(settings.targets, linear=names, others=others, never=experts)
    kept = [replace(one, layers=tuple(layer for layer in one.layers if layer in set(chosen))) for one in linear]
    return names, [one for one in kept if one.layers]


def _of_all_stages(own: list[Any]) -> list[Any]:
    """Return the items of all pipeline ranks."""
    group = mpu.get_pipeline_model_parallel_group()
    stages: list[list[Any]] = [[]] * group.size()
    dist.all_gather_object(stages, own, group=group)
    return [item for stage in stages for item in stage]


def _existing(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every layer has a matrix A"
    return tensor.float()


def _require_grad(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_(torch.is_grad_enabled())
