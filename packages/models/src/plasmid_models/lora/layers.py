"""Linear layers with a low-rank adapter (LoRA, Hu et al. 2021), inserted into a transformers model.

The base weights keep their names, so that code that uses the names of the model folder keeps working.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from plasmid.components import AdapterSpec
from plasmid.errors import ModelError
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..folder import is_torch_dist, weight_files
from .targets import KEY, match_targets


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


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ``W + scale * B A`` in fp32 or better."""
    high = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(high).addmm(b.to(high), a.to(high), alpha=scale)


def draw_matrices(shapes: Iterable[tuple[int, ...]], *, seed: int) -> Iterator[Tensor]:
    """Yield the initial matrix A [r, in] of each layer on the CPU, drawn like the weights of PyTorch's linear layers.

    B starts as zeros, so that the policy equals its base.
    """
    generator = torch.Generator().manual_seed(seed)
    for shape in shapes:
        bound = 1 / math.sqrt(shape[1])
        yield torch.empty(shape).uniform_(-bound, bound, generator=generator)


def insert_adapter(lm: PreTrainedModel, spec: AdapterSpec, *, dtype: torch.dtype) -> dict[str, LoRALinear]:
    """Replace the target layers by `LoRALinear`s with zero adapters; return them by module name, in the model's order.

    Raises `ModelError` if there are none, or if a pattern matches no linear layer or parameters that cannot have an
    adapter.
    """
    layers = {}
    for name, module in _select_layers(lm, spec.targets).items():
        layers[name] = LoRALinear(module, rank=spec.rank, scale=spec.scale, dtype=dtype)
        lm.set_submodule(name, layers[name])
    return layers


def linear_layers(lm: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return all plain linear layers except the head, by name."""
    head = lm.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {name: module for name, module in lm.named_modules() if type(module) is nn.Linear and module is not head}


def _select_layers(lm: PreTrainedModel, targets: Collection[str]) -> dict[str, nn.Linear]:
    """Return all linear layers of the decoder, or those whose name matches a pattern."""
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
        return found
    owners = {f"{name}.weight" for name in own} | {f"{name}.bias" for name in own}
    others = [name for name, _ in lm.named_parameters(remove_duplicate=False) if name not in owners]
    fused = {name for name in others if lm.get_parameter(name).ndim == 3}
    return {name: own[name] for name in match_targets(targets, linear=own, others=others, never=fused)}


def _decoder_layers(lm: PreTrainedModel) -> list[str]:
    kinds = set(lm._no_split_modules or ())
    return [name for name, module in lm.named_modules() if type(module).__name__ in kinds]


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
