"""Insertion of an adapter into a transformers model.

The base weights keep their names, so that code that uses the names of the model folder keeps working.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from plasmid.components import AdapterSpec
from plasmid.errors import ModelError
from torch import nn
from transformers import PreTrainedModel

from ..pieces import Piece, Pieces
from .experts import LoRAExperts, Projection, find_projections, insert_into_experts, select_projections
from .layers import LoRALinear
from .targets import KEY, match_targets

AdaptedLayers = Mapping[str, LoRALinear | LoRAExperts]
"""Layers with an adapter by module name: linear layers, then projections of experts, each in the model's order."""


def insert_adapter(lm: PreTrainedModel, spec: AdapterSpec, *, dtype: torch.dtype) -> AdaptedLayers:
    """Insert zero adapters into the target layers and return them; linear layers are replaced by `LoRALinear`s.

    Raises `ModelError` if there are none, or if a pattern matches no layer or parameters that cannot have an adapter.
    """
    layers: dict[str, LoRALinear | LoRAExperts] = {}
    linear, projections = _select_layers(lm, spec.targets)
    for name, module in linear.items():
        layers[name] = inserted = LoRALinear(module, rank=spec.rank, scale=spec.scale, dtype=dtype)
        lm.set_submodule(name, inserted)
    for one in projections:
        layers[one.name] = insert_into_experts(lm, one, rank=spec.rank, scale=spec.scale, dtype=dtype)
    return layers


def adapter_pieces(layers: AdaptedLayers) -> Pieces:
    """Return the matrices of single experts in each of the adapter's tensors, by the tensor's name."""
    found: dict[str, tuple[Piece, ...]] = {}
    for name, layer in layers.items():
        if isinstance(layer, LoRAExperts):
            found |= layer.pieces(name)
    return found


def folder_layers(layers: AdaptedLayers) -> list[str]:
    """Return the names of the adapted layers in the model folder, which has one layer per expert."""
    return [
        of_folder
        for name, layer in layers.items()
        for of_folder in (layer.projection.layers if isinstance(layer, LoRAExperts) else (name,))
    ]


def adaptable_layers(lm: PreTrainedModel) -> list[str]:
    """Return the names in the model folder of all layers that can have an adapter."""
    return [*linear_layers(lm), *(layer for one in find_projections(lm) for layer in one.layers)]


def linear_layers(lm: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return all plain linear layers except the head, by name."""
    head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {name: module for name, module in lm.named_modules() if type(module) is nn.Linear and module is not head}


def _select_layers(lm: PreTrainedModel, targets: Collection[str]) -> tuple[dict[str, nn.Linear], list[Projection]]:
    """Return all linear layers of the decoder, or the layers and projections whose name matches a pattern."""
    own = linear_layers(lm)
    if not own:
        raise ModelError("trainer.lora: the model has no plain linear layers except its head; train without an adapter")
    if not targets:
        layers = tuple(f"{name}." for name in _decoder_layers(lm))
        found = {name: module for name, module in own.items() if name.startswith(layers)}
        if not found:
            raise ModelError(
                f"{KEY}: the decoder layers of this model cannot be determined; set patterns, for example "
                f"{next(iter(own))}"
            )
        return found, []
    projections = find_projections(lm)
    owners = {f"{name}.weight" for name in own} | {f"{name}.bias" for name in own}
    owners |= {f"{one.experts}.{one.fused}" for one in projections}
    others = [name for name, _ in lm.named_parameters(remove_duplicate=False) if name not in owners]
    fused = {name for name in others if lm.get_parameter(name).ndim == 3}
    names = [*own, *(layer for one in projections for layer in one.layers)]
    chosen = set(match_targets(targets, layers=names, others=others, never=fused))
    linear = {name: module for name, module in own.items() if name in chosen}
    return linear, select_projections(projections, chosen)


def _decoder_layers(lm: PreTrainedModel) -> list[str]:
    kinds = set(lm._no_split_modules or ())
    return [name for name, module in lm.named_modules() if type(module).__name__ in kinds]
