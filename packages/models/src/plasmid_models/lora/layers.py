"""Linear layers with a low-rank adapter (LoRA, Hu et al. 2021), initial matrices, and the identity of a base."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..folder import is_torch_dist, weight_files

Merge = Callable[[Tensor], Tensor]
"""Function that merges an adapter into a weight."""


class LoRALinear(nn.Linear):
    """``x W^T + b + scale * x A^T B^T``, with A [r, in] and B [out, r]."""

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dtype: torch.dtype) -> None:
        """Reuse the weight and bias of ``base``; A and B are zeros on the same device."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.zeros(rank, base.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=dtype, device=device))
        self.scale, self.is_on = scale, True

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out]; without the adapter's term while it is off."""
        out = F.linear(x, self.weight, self.bias)
        if not self.is_on:
            return out
        return out + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def merge_into(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return the weight with the whole matrices A and B merged, in fp32 or better."""
        return merge(weight, a, b, self.scale)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + scale * B A`` in fp32 or better."""
    high = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(high).addmm(b.to(high), a.to(high), alpha=scale)


def combine_merges(merges: Iterable[tuple[str, Merge]]) -> dict[str, Merge]:
    """Return one function per weight name, which applies all of the name's functions in their order."""
    found: dict[str, list[Merge]] = {}
    for name, function in merges:
        found.setdefault(name, []).append(function)
    return {name: partial(_apply_all, functions) for name, functions in found.items()}


def _apply_all(functions: Sequence[Merge], weight: Tensor) -> Tensor:
    for function in functions:
        weight = function(weight)
    return weight


def draw_matrices(shapes: Iterable[tuple[int, ...]], *, seed: int) -> Iterator[Tensor]:
    """Yield the initial A [r, in] or [E, r, in] of each layer on the CPU, drawn like the weights of linear layers.

    B starts as zeros, so that the policy equals its base.
    """
    generator = torch.Generator().manual_seed(seed)
    for shape in shapes:
        bound = 1 / math.sqrt(shape[-1])
        yield torch.empty(shape).uniform_(-bound, bound, generator=generator)


BLOCKS, BLOCK_BYTES = 64, 1 << 16


def fingerprint(where: str, folder: Path) -> str:
    """Return the SHA-256 of the folder's config and of evenly spaced blocks of its weight files, including both ends.

    Two models of the same architecture differ in every block; reading all bytes of a large model would take minutes.
    Raises `ModelError` if weights are missing.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.distcp")) if is_torch_dist(folder) else weight_files(where, folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for block in range(BLOCKS):
                opened.seek(max(0, size - BLOCK_BYTES) * block // (BLOCKS - 1))
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()
