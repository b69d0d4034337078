"""Low-rank adapters of routed experts, which transformers fuses into one tensor per projection or pair of projections.

Every layer of every expert in the model folder has its own A and B. E experts, T pairs of a token and its expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from plasmid.errors import ModelError, abbreviate
from torch import Tensor, nn
from torch.nn import functional as F

from ..building import GROUPED_ALIGNMENT
from ..pieces import Piece, pieces_of
from .layers import merge
from .targets import KEY

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "lora"
"""Name of the adapters within their experts."""
FUSED = ("gate_up_proj", "down_proj")
"""Parameters of experts that can have an adapter, in the order in which they are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The same linear layer of all experts of a decoder layer."""

    experts: str
    """Name of the module of the experts."""
    fused: str
    """Name of the parameter of this module that contains the projection's weights [E, out, in]."""
    rows: slice
    """Rows of the parameter that belong to the projection."""
    size: int
    """Number of inputs."""
    layers: tuple[str, ...]
    """Name of each expert's layer in the model folder."""

    @property
    def name(self) -> str:
        """Name of the adapter's module."""
        return f"{self.experts}.{NAME}.{self.kind}"

    @property
    def kind(self) -> str:
        """Last part of the names of its layers, such as ``down_proj``."""
        return self.layers[0].rpartition(".")[2]

    @property
    def position(self) -> tuple[str, int, int]:
        """Key that sorts the projections of a model."""
        return self.experts, FUSED.index(self.fused), self.rows.start


class LoRAExperts(nn.Module):
    """``scale * x A_e^T B_e^T`` for each expert e of a projection, with A [E, r, in] and B [E, out, r]."""

    def __init__(self, projection: Projection, *, rank: int, scale: float, **options: Any) -> None:
        """Create A and B as zeros for all layers of ``projection``; ``options`` are their dtype and device."""
        super().__init__()
        self.projection, self.scale, self.is_on = projection, scale, True
        rows, count = projection.rows, len(projection.layers)
        self.lora_A = nn.Parameter(torch.zeros(count, rank, projection.size, **options))
        self.lora_B = nn.Parameter(torch.zeros(count, rows.stop - rows.start, rank, **options))

    @property
    def weight_name(self) -> str:
        """Name of the adapted parameter."""
        return f"{self.projection.experts}.{self.projection.fused}"

    def pieces(self, name: str) -> dict[str, tuple[Piece, ...]]:
        """Return the matrices of each expert, by the name of A and of B of the adapter's module ``name``."""
        layers = self.projection.layers
        return {
            f"{name}.{kind}": tuple(Piece(f"{layer}.{kind}", (index,)) for index, layer in enumerate(layers))
            for kind in ("lora_A", "lora_B")
        }

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return the term [T, out] for [T, in], sorted by expert; ``ends`` [E] are the ends of each expert's rows."""
        a, b = self.lora_A.to(x.dtype), self.lora_B.to(x.dtype)
        return self.scale * grouped_linear(grouped_linear(x, a, ends), b, ends)

    def merge_into(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the fused weight with the whole matrices A and B merged, in fp32 or better."""
        rows = self.projection.rows
        merged = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for own, of_expert, a_e, b_e in zip(merged, weight, a, b, strict=True):
            own[rows] = merge(of_expert[rows], a_e, b_e, self.scale)
        return merged


def find_projections(lm: PreTrainedModel) -> list[Projection]:
    """Return the projections of all experts that can have an adapter: gated, without bias, and not transposed."""
    found = []
    for name, pieces in pieces_of(lm).items():
        path, _, fused = name.rpartition(".")
        experts = lm.get_submodule(path)
        if fused not in FUSED or not getattr(experts, "has_gate", False) or experts.has_bias or experts.is_transposed:
            continue
        size, layers = int(getattr(experts, fused).shape[2]), dict[tuple[int, int], list[str]]()
        for piece in pieces:
            _, rows, _ = piece.index
            assert isinstance(rows, slice), "experts are the first dimension"
            layers.setdefault((rows.start, rows.stop), []).append(piece.name.removesuffix(".weight"))
        found += [
            Projection(experts=path, fused=fused, rows=slice(*rows), size=size, layers=tuple(names))
            for rows, names in layers.items()
        ]
    return sorted(found, key=lambda one: one.position)


def select_projections(projections: Iterable[Projection], chosen: Collection[str]) -> list[Projection]:
    """Return the projections of which all layers are ``chosen``. Raises `ModelError` if only some are."""
    selected = []
    for one in projections:
        absent = [layer for layer in one.layers if layer not in chosen]
        if 0 < len(absent) < len(one.layers):
            raise ModelError(f"{KEY}: must match all experts of a layer or none, but do not match {abbreviate(absent)}")
        if not absent:
            selected.append(one)
    return selected


def insert_into_experts(
    lm: PreTrainedModel, projection: Projection, *, rank: int, scale: float, dtype: torch.dtype
) -> LoRAExperts:
    """Insert the adapter of a projection into its experts, whose forward pass then includes the adapter."""
    experts = lm.get_submodule(projection.experts)
    if not hasattr(experts, NAME):
        experts.add_module(NAME, nn.ModuleDict())
        experts.forward = partial(compute_experts, experts)
    device = getattr(experts, projection.fused).device
    adapter = LoRAExperts(projection, rank=rank, scale=scale, dtype=dtype, device=device)
    getattr(experts, NAME)[projection.kind] = adapter
    return adapter


def compute_experts(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return [n, hidden], as the forward pass of transformers' experts; each of n tokens has k experts [n, k]."""
    chosen, order = top_k_index.flatten().sort(stable=True)
    numbers = torch.arange(len(experts.down_proj), device=chosen.device)  # type: ignore[arg-type]
    ends = torch.searchsorted(chosen, numbers, right=True).int()
    x = _project(experts, "gate_up_proj", hidden[order // top_k_index.shape[1]], ends)
    x = _project(experts, "down_proj", experts._apply_gate(x), ends)  # type: ignore[operator]
    x = x * top_k_weights.flatten()[order, None]
    return x[order.argsort()].view(*top_k_index.shape, -1).sum(1).to(hidden.dtype)


def _project(experts: nn.Module, fused: str, x: Tensor, ends: Tensor) -> Tensor:
    return add_terms(grouped_linear(x, getattr(experts, fused), ends), x, ends, getattr(experts, NAME).values(), fused)


def add_terms(out: Tensor, x: Tensor, ends: Tensor, adapters: Iterable[LoRAExperts], fused: str) -> Tensor:
    """Add the terms of the ``adapters`` of a fused weight to its product ``out``, in place."""
    for adapter in adapters:
        if adapter.is_on and adapter.projection.fused == fused:
            out[:, adapter.projection.rows] += adapter(x, ends)
    return out


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return ``x W_e^T`` [T, out] for the rows of each expert e.

    Sizes that torch's grouped product refuses are computed expert by expert, as in `choose_expert_products`.
    """
    is_aligned = all(size * weight.itemsize % GROUPED_ALIGNMENT == 0 for size in weight.shape[1:])
    if is_aligned and weight.dtype != torch.float64:
        return F.grouped_mm(x, weight.mT, offs=ends)
    parts = x.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(part, own) for part, own in zip(parts, weight, strict=True)])
