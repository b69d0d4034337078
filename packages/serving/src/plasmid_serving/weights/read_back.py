"""Check that loaded tensors are in the engine's parameters, which the engine fuses, pads and shards in its own way.

This works without knowledge of the architecture. A tensor is loaded once as NaN, which reveals where it goes. Then it
is loaded again, and these places must hold the tensor, or this process's part of it, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from plasmid.errors import SyncError
from torch import Tensor, nn

if TYPE_CHECKING:
    from .loading import Fusions

LAYER = re.compile(r"^(.*?\.layers\.\d+)\.")


def verify(model: nn.Module, named: Sequence[tuple[str, Tensor]], fusions: Fusions, *, complete: bool) -> set[str]:
    """Return the parameters that hold the tensors. With ``complete`` this process holds the whole model.

    Raises `SyncError` naming the first tensor that is missing. The tensors must have been loaded before.
    """
    parameters = dict(model.named_parameters())
    touched: set[str] = set()
    sent = dict(named)
    for name, tensor in named:
        partners = fusions.partners(parameters.keys(), name)
        others = [(partner, sent[partner]) for partner in partners if partner != name]
        model.load_weights([(name, torch.full_like(tensor, torch.nan)), *others])  # type: ignore[operator]
        places = _places(parameters, name)
        model.load_weights([(name, tensor), *others])  # type: ignore[operator]
        if not places and complete:
            raise SyncError(f"tensor {name!r} was loaded into none of the engine's parameters")
        for own, mask in places.items():
            if not equals_sent(parameters[own].detach()[mask], tensor):
                raise SyncError(f"the engine's parameter {own!r} differs from the sent tensor {name!r}")
        touched |= places.keys()
    return touched


def _places(parameters: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Find the parameters that contain NaN, with its places. Checks those of the same layer first."""
    layer = LAYER.match(name)
    near = {own: p for own, p in parameters.items() if _layer_of(own) == (layer.group(1) if layer else None)}
    return _nan(near) or _nan({own: p for own, p in parameters.items() if own not in near})


def _layer_of(name: str) -> str | None:
    found = LAYER.match(name)
    return found.group(1) if found else None


def _nan(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, parameter in parameters.items():
        if parameter.is_floating_point():
            mask = parameter.detach().isnan()
            if mask.any():
                found[name] = mask
    return found


def equals_sent(got: Tensor, sent: Tensor) -> bool:
    """Return whether ``got``, read in row-major order, is the tensor or the part that one of several ranks holds."""
    if got.numel() == 0 or got.numel() > sent.numel():
        return False
    return any(torch.equal(_bits(got), _bits(part.to(got.dtype))) for part in _parts(sent, got.numel()))


def _parts(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the parts with this many elements. With padding after the tensor, the rank that holds its end has a
    shorter part."""
    if size == tensor.numel():
        yield tensor
        if tensor.dim() == 2:
            yield tensor.T
        return
    for dim in range(tensor.dim()):
        length = tensor.shape[dim]
        count, odd = divmod(size * length, tensor.numel())
        if odd:
            continue
        yield tensor.narrow(dim, length - count, count)
        yield from (tensor.narrow(dim, first, count) for first in range(0, length - count + 1, count))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
