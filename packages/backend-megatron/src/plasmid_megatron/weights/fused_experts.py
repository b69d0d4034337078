"""Experts that a folder stores in one tensor per layer, read as the matrices of single experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

from torch import Tensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One expert's matrix [out, in] in a tensor [E, rows, in]. Has the interface of a slice of safetensors."""

    fused: Any
    expert: int
    rows: slice

    def __getitem__(self, part: EllipsisType) -> Tensor:
        """Read the matrix."""
        matrix: Tensor = self.fused[self.expert : self.expert + 1][0, self.rows]
        return matrix[part]


def split_experts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folder's slices by name, with one per expert in place of a layer's experts."""
    return {own: part for name, saved in found.items() for own, part in _split(name, saved)}


def _split(name: str, saved: Any) -> Iterator[tuple[str, Any]]:
    if not name.endswith((GATE_UP, DOWN)):
        yield name, saved
        return
    path, _, fused = name.rpartition(".")
    experts, rows = saved.get_shape()[:2]
    cuts = {"down_proj": slice(0, rows)}
    if fused != "down_proj":
        cuts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    for expert in range(experts):
        for projection, cut in cuts.items():
            yield f"{path}.{expert}.{projection}.weight", ExpertSlice(saved, expert, cut)
