"""The adapter of a policy that is split over ranks. Implements `plasmid_training.rank.backend.Adapter`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedBase
from plasmid.errors import ModelError
from plasmid_models.lora.experts import Projection, select_projections
from plasmid_models.lora.layers import Merge, combine_merges, draw_matrices, fingerprint
from plasmid_models.lora.peft_folder import adapter_config, read_adapter_tensors
from plasmid_models.lora.targets import KEY, match_targets
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.lora_settings import LoRASettings
from torch import Tensor, nn

from ..weights.bridge import Architecture
from ..weights.gathering import Gatherer
from ..weights.shards import Weight, experts_per_rank, hf_names, weights
from .experts import AdaptedExperts, check_expert_split, describe_experts, find_experts
from .linear import AdaptedLinear, FusedLinear, Read, describe_linear, is_linear

MATRICES = ("lora_A", "lora_B")
Selected = FusedLinear | Projection
Own = Mapping[str, tuple[Any, Weight]]
"""Module and weight of this rank by the name of a `Selected`; for experts, the weight of the first."""


class ParallelAdapter:
    """fp32 LoRA matrices of a frozen language model, split over the ranks like the layers that they belong to."""

    def __init__(
        self, chunks: Sequence[nn.Module], architecture: Architecture, settings: LoRASettings, source: Source
    ) -> None:
        """Freeze the model and insert the adapter. All ranks create it together. Raises `ModelError`."""
        self._architecture, self._settings = architecture, settings
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                # else a recomputed first layer has no gradient, and a compiled one needs its own graphs
                chunk.embedding.register_forward_hook(_require_grad)  # type: ignore[union-attr]
        own, adaptable, others = _describe(chunks, architecture)
        self._adaptable, self._selected = _select(_of_all_stages(adaptable), _of_all_stages(others), settings)
        self.layers = [self._insert(one, *own[one.name]) for one in self._selected if one.name in own]
        """Layers of this rank with an adapter."""
        _check_stages(self.layers)
        self.before_access: Callable[[], None] = _do_nothing
        """Called by all ranks before A and B are read or written outside of a forward pass."""
        self.base = {"path": str(source.path), "sha256": fingerprint(source.where, source.path)}
        """Folder of the base and a hash of its content."""

    def _insert(self, selected: Selected, module: Any, base: Weight) -> AdaptedLinear | AdaptedExperts:
        spec, architecture = self._settings.spec(), self._architecture
        if isinstance(selected, FusedLinear):
            return AdaptedLinear(module, base, selected, architecture, rank=spec.rank, scale=spec.scale)
        return AdaptedExperts(module, base, selected, architecture, rank=spec.rank, scale=spec.scale)

    def matrices(self) -> list[Weight]:
        """Return A and B of this rank's layers."""
        return [weight for _, weight in self._of_layers()]

    def _of_layers(self) -> Iterator[tuple[AdaptedLinear | AdaptedExperts, Weight]]:
        for layer in self.layers:
            for kind in MATRICES:
                yield layer, layer.matrix(kind)

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
        self.before_access()
        return self._gatherer.tensors(dtype=dtype, device=device)

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        return self._gatherer.gatherables(dtype)

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        self.before_access()
        return self._gatherer.shares(rounds, dtype=dtype, device=device)

    def config(self, base: str) -> dict[str, Any]:
        adapted = [layer for selected in self._selected for layer in selected.layers]
        return adapter_config(self._settings.spec(), base=base, adapted=adapted, adaptable=self._adaptable)

    def merge(self) -> Mapping[str, Merge]:
        """Return a function per adapted weight of this rank that merges the adapter into it; none if it is off."""
        return combine_merges(merge for layer in self.layers if layer.module.is_on for merge in layer.merges())

    @torch.no_grad()
    def fill(self, *, seed: int) -> None:
        """Load `start_from`, or initialize A like PyTorch's linear layers and B to 0: the policy equals the base.

        The result is the same for any parallel layout, and for trainer 'fsdp'. Raises `ModelError`.
        """
        if self._settings.start_from != "none":
            self._read(Path(self._settings.start_from))
            return
        rank, sizes = self._settings.rank, self._sizes()
        drawn = draw_matrices(((rank, inputs) for _, inputs in sizes.values()), seed=seed)
        own = {layer for adapted in self.layers for layer in adapted.layers}
        found = {f"{layer}.lora_A": a for layer, a in zip(sizes, drawn, strict=True) if layer in own}
        self._copy(found.get)

    def _read(self, folder: Path) -> None:
        rank, shapes = self._settings.rank, dict[str, tuple[int, ...]]()
        for layer, (outputs, inputs) in self._sizes().items():
            shapes[f"{layer}.lora_A.weight"] = rank, inputs
            shapes[f"{layer}.lora_B.weight"] = outputs, rank
        with read_adapter_tensors(folder, shapes) as saved:
            self._copy(lambda name: saved[f"{name}.weight"][...])

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of outputs and inputs of each of the folder's layers, in the order of `fsdp`."""
        found: dict[str, tuple[int, int]] = {}
        for one in self._selected:
            if isinstance(one, FusedLinear):
                rows = one.rows(self._architecture)
                found |= {layer: (len(rows[layer]), one.shape[1]) for layer in one.layers}
            else:
                found |= dict.fromkeys(one.layers, (one.rows.stop - one.rows.start, one.size))
        return found

    def _copy(self, read: Read) -> None:
        for layer in self.layers:
            layer.copy(read)

    def sharded_state(self) -> dict[str, ShardedBase]:
        """Return A and B of this rank for a checkpoint in Megatron's distributed format, by `Weight.name`."""
        self.before_access()
        return {weight.name: layer.sharded(weight) for layer, weight in self._of_layers()}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors that were read for the entries of `sharded_state`."""
        for weight in self.matrices():
            weight.tensor.copy_(state[weight.name])

    @cached_property
    def _gatherer(self) -> Gatherer:
        return Gatherer(self.matrices(), self._architecture, convert=self._to_hf)

    def _to_hf(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the matrices of the folder's layers that a whole matrix in Megatron's layout consists of."""
        return self._layer_of[name].to_hf(name.rpartition(".")[2], whole)

    @cached_property
    def _layer_of(self) -> Mapping[str, AdaptedLinear | AdaptedExperts]:
        """Return a dictionary from the name of each matrix on this rank to its layer."""
        return {weight.name: layer for layer, weight in self._of_layers()}


def _describe(chunks: Sequence[nn.Module], architecture: Architecture) -> tuple[Own, list[Selected], list[str]]:
    """Find the layers of this rank that can have an adapter.

    Returns them with their weights by name, their descriptions, and the folder's names of all other weights.
    """
    own: dict[str, tuple[Any, Weight]] = {}
    adaptable: list[Selected] = []
    others: list[str] = []
    for chunk in chunks:
        for weight in weights([chunk]):
            experts, found = find_experts(chunk, weight), list[Selected]()
            module: Any = experts
            if is_linear(weight):
                module = chunk.get_submodule(weight.own_name.removesuffix(".weight"))
                found = [describe_linear(module, weight, architecture)]
            elif experts is None:
                name = weight.full_name(mpu.get_expert_model_parallel_rank(), experts_per_rank(architecture))
                others += hf_names(architecture, name)
            elif weight.expert == 0:  # describes all experts
                found = [*describe_experts(weight, architecture)]
            own |= {one.name: (module, weight) for one in found}
            adaptable += found
    return own, adaptable, others


def _select(adaptable: list[Selected], others: list[str], settings: LoRASettings) -> tuple[list[str], list[Selected]]:
    """Return the names of the folder's layers that can have an adapter, and the descriptions of those that get one.

    Both are in the order of trainer 'fsdp'.
    """
    linear = sorted((one for one in adaptable if isinstance(one, FusedLinear)), key=lambda one: one.position)
    projections = sorted((one for one in adaptable if isinstance(one, Projection)), key=lambda one: one.position)
    names = [layer for one in linear for layer in one.layers]
    every = [*names, *(layer for one in projections for layer in one.layers)]
    chosen = set(names)
    if settings.targets:
        biases = {f"{name}.bias" for name in names}
        others = [name for name in others if name not in biases]
        experts = {name for name in others if ".experts." in name}
        chosen = set(match_targets(settings.targets, layers=every, others=others, never=experts))
    kept = [replace(one, layers=tuple(layer for layer in one.layers if layer in chosen)) for one in linear]
    selected = select_projections(projections, chosen)
    if selected:
        check_expert_split()
    return every, [*(one for one in kept if one.layers), *selected]


def _check_stages(layers: Sequence[AdaptedLinear | AdaptedExperts]) -> None:
    """Raise `ModelError` if the first optimizer would have no weights on some ranks, which Megatron cannot save."""
    own = {layer.in_expert_group for layer in layers}
    every = _of_all_stages([own])
    first = min(set().union(*every), default=False)  # True: only experts are trained, with their own optimizer
    if not all(first in kinds for kinds in every):
        raise ModelError(
            f"{KEY}: some pipeline ranks have no layer with an adapter; choose targets on every pipeline rank, or "
            "lower trainer.pipeline_parallel"
        )


def _of_all_stages(own: list[Any]) -> list[Any]:
    """Return the items of all pipeline ranks."""
    group = mpu.get_pipeline_model_parallel_group()
    stages: list[list[Any]] = [[]] * group.size()
    dist.all_gather_object(stages, own, group=group)
    return [item for stage in stages for item in stage]


def _do_nothing() -> None:
    pass


def _require_grad(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    return hidden.requires_grad_(torch.is_grad_enabled())
