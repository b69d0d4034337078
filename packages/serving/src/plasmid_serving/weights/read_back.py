"""Check that loaded tensors are in the engine's parameters, which the engine fuses, pads and shards in its own way.

This works without knowledge of the architecture. First, all tensors of a bucket are loaded filled with infinity, then
filled with a different number for each tensor, which shows the rows of parameters that each tensor is loaded into. Then
the tensors themselves are loaded again, and these rows must hold the tensor, or this process's part of it, bit for bit.
If a row belongs to several tensors, or only partly to one, each tensor is instead loaded filled with NaN, one after the
other, and the parameters of its layer are searched for NaN. This takes seconds for a layer of 128 experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import torch
from plasmid.errors import SyncError
from torch import Tensor, nn

if TYPE_CHECKING:
    from .loading import Fusions

Part = tuple[slice, ...]
"""Index of a part of a tensor; empty for all of it."""
LAYER = re.compile(r"(?:^|\.)(layers\.\d+)\.")
MARKS = 128
"""Maximum number that marks a tensor. All integers up to this one are exact in each of `MARKED_TYPES`."""
MARKED_TYPES = frozenset((torch.bfloat16, torch.float16, torch.float32, torch.float64))
VISION = frozenset(("visual", "vision_tower", "multi_modal_projector"))
"""Modules of a vision model. It is not trained and keeps the weights that the server has read from the folder."""


def list_sent_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that a weight sync sets, by name."""
    return {name: p for name, p in model.named_parameters() if VISION.isdisjoint(name.split("."))}


def verify(model: nn.Module, named: Sequence[tuple[str, Tensor]], fusions: Fusions, *, complete: bool) -> set[str]:
    """Return the parameters that hold the tensors. With ``complete`` this process holds the whole model.

    Raises `SyncError` naming the first tensor that is missing. The tensors must have been loaded before.
    """
    parameters = list_sent_parameters(model)
    found = _rows_by_tensor(model, parameters, named)
    model.load_weights(named)  # type: ignore[operator]
    if found is None:
        return _verify_each(model, parameters, named, fusions, complete=complete)
    touched: set[str] = set()
    for name, tensor in named:
        rows = found.get(name, {})
        held = {own: _as_rows(parameters[own])[index] for own, index in rows.items()}
        _check_held(name, tensor, held, complete=complete)
        touched |= rows.keys()
    return touched


def _verify_each(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    named: Sequence[tuple[str, Tensor]],
    fusions: Fusions,
    *,
    complete: bool,
) -> set[str]:
    """Implement `verify` for tensors that share rows of parameters: find the elements of each by loading it as NaN."""
    touched: set[str] = set()
    sent = dict(named)
    for name, tensor in named:
        others = _partners(name, sent, fusions, parameters.keys())
        places = _load_nan(model, parameters, name, tensor, others)
        model.load_weights([(name, tensor), *others])  # type: ignore[operator]
        held = {own: parameters[own].detach()[mask] for own, mask in places.items()}
        _check_held(name, tensor, held, complete=complete)
        touched |= places.keys()
    return touched


def _check_held(name: str, tensor: Tensor, held: Mapping[str, Tensor], *, complete: bool) -> None:
    """Compare a tensor with the elements of the parameters that it was loaded into."""
    if complete and not held:
        raise SyncError(f"tensor {name!r} was loaded into none of the engine's parameters")
    for own, elements in held.items():
        if not equals_sent(elements, tensor):
            raise SyncError(f"the engine's parameter {own!r} differs from the sent tensor {name!r}")


def _rows_by_tensor(
    model: nn.Module, parameters: Mapping[str, Tensor], named: Sequence[tuple[str, Tensor]]
) -> dict[str, dict[str, Tensor]] | None:
    """Return, by tensor and parameter, the rows that hold the tensor; None if some row holds it only partly.

    Parameters of other layers are only searched for tensors that were not found in their own.
    """
    layers = {_layer_of(name) for name, _ in named}
    near = {own: p for own, p in parameters.items() if _layer_of(own) in layers}
    found = _marked_rows(model, near, named)
    if found is None or len(found) == len(named):
        return found
    far = {own: p for own, p in parameters.items() if own not in near}
    rest = _marked_rows(model, far, [(name, tensor) for name, tensor in named if name not in found])
    return None if rest is None else found | rest


def _marked_rows(
    model: nn.Module, parameters: Mapping[str, Tensor], named: Sequence[tuple[str, Tensor]]
) -> dict[str, dict[str, Tensor]] | None:
    """Return, by tensor and parameter, the indices of the rows that hold the tensor, of these parameters alone."""
    floating = {own: p for own, p in parameters.items() if p.is_floating_point() and p.numel()}
    if not {t.dtype for t in (*floating.values(), *dict(named).values())} <= MARKED_TYPES:
        return None
    _load_marks(model, named, [math.inf] * len(named))
    changed: dict[str, Tensor] = {}
    for own, parameter in floating.items():
        low, high = _limits(parameter)
        if not torch.equal(low.isinf(), high.isinf()):
            return None
        if low.isinf().any():
            changed[own] = low.isinf().nonzero().flatten()
    numbers = {own: torch.zeros_like(rows) for own, rows in changed.items()}
    for base in (1, MARKS) if len(named) > MARKS else (1,):
        _load_marks(model, named, [number // base % MARKS + 1 for number in range(len(named))])
        for own, rows in changed.items():
            low, high = (limit[rows] for limit in _limits(parameters[own]))
            if not torch.equal(low, high):
                return None
            numbers[own] += (low.double() - 1).round().long() * base
    found: dict[str, dict[str, Tensor]] = {}
    for own, rows in changed.items():
        for number in numbers[own].unique().tolist():  # type: ignore[no-untyped-call]
            if not 0 <= number < len(named):
                return None
            found.setdefault(named[number][0], {})[own] = rows[numbers[own] == number]
    return found


def _load_marks(model: nn.Module, named: Sequence[tuple[str, Tensor]], marks: Sequence[float]) -> None:
    """Load tensors of the same shapes, each filled with one number, one in memory at a time."""
    pairs = zip(named, marks, strict=True)
    model.load_weights((name, torch.full_like(tensor, mark)) for (name, tensor), mark in pairs)  # type: ignore[operator]


def _limits(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest element of each row."""
    low, high = _as_rows(parameter).aminmax(dim=1)
    return low, high


def _as_rows(parameter: Tensor) -> Tensor:
    """Return the parameter as a matrix of rows along its last dimension; a vector has rows of one element."""
    return parameter.detach().reshape(-1, parameter.shape[-1] if parameter.dim() > 1 else 1)


def find_part(
    model: nn.Module, named: Sequence[tuple[str, Tensor]], fusions: Fusions, name: str, tensor: Tensor
) -> Part | None:
    """Return the part of a loaded tensor that this process's parameters hold; None if they hold nothing of it.

    ``named`` are the tensors that were loaded with it. Loads a random tensor in its place, because parts of the tensor
    itself may be equal, then the tensor again.
    """
    parameters = list_sent_parameters(model)
    others = _partners(name, dict(named), fusions, parameters.keys())
    places = _load_nan(model, parameters, name, tensor, others)
    generator = torch.Generator(tensor.device).manual_seed(0)
    random = torch.rand(tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype)
    model.load_weights([(name, random), *others])  # type: ignore[operator]
    found = [parameters[own].detach()[mask] for own, mask in places.items()]
    model.load_weights([(name, tensor), *others])  # type: ignore[operator]
    if not found:
        return None
    parts = _parts(tensor.shape, found[0].numel())
    return next((part for part in parts if all(_equal(own, random[part]) for own in found)), ())


def _partners(
    name: str, sent: Mapping[str, Tensor], fusions: Fusions, parameters: AbstractSet[str]
) -> list[tuple[str, Tensor]]:
    """Return the other tensors that must be loaded in the same call."""
    return [(partner, sent[partner]) for partner in fusions.find_partners(parameters, name) if partner != name]


def _load_nan(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    name: str,
    tensor: Tensor,
    others: Sequence[tuple[str, Tensor]],
) -> dict[str, Tensor]:
    """Load NaN in place of a tensor. Returns a mask of its elements for each parameter that it is loaded into."""
    model.load_weights([(name, torch.full_like(tensor, torch.nan)), *others])  # type: ignore[operator]
    return _places(parameters, name)


def _places(parameters: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return masks of NaN by parameter: of the tensor's layer, or of all other layers if that has none."""
    layer = _layer_of(name)
    near = {own: p for own, p in parameters.items() if _layer_of(own) == layer}
    return _nan(near) or _nan({own: p for own, p in parameters.items() if own not in near})


def _layer_of(name: str) -> str | None:
    found = LAYER.search(name)
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
    if got.numel() == sent.numel() and sent.dim() == 2 and _equal(got, sent.T):
        return True
    return any(_equal(got, sent[part]) for part in _parts(sent.shape, got.numel()))


def _parts(shape: Sequence[int], size: int) -> Iterator[Part]:
    """Yield the parts with this many elements. With padding after the tensor, the rank that holds its end has a
    shorter part."""
    if size == math.prod(shape):
        yield ()
        return
    for dim, length in enumerate(shape):
        count, odd = divmod(size * length, math.prod(shape))
        if odd:
            continue
        for first in (length - count, *range(0, length - count + 1, count)):
            yield (*(slice(None),) * dim, slice(first, first + count), *(slice(None),) * (len(shape) - dim - 1))


def _equal(got: Tensor, sent: Tensor) -> bool:
    """Return whether two tensors have the same elements, bit by bit, in row-major order."""
    return torch.equal(_bits(got), _bits(sent.to(got.dtype)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
