"""Copies of fp32 weights in the compute dtype, for a model on a single rank that is not sharded with FSDP2."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class ComputeCopies:
    """Mixed precision as in FSDP2, without its hooks and its copies of gathered weights and gradients.

    The module's parameters are the fp32 weights, except within `use`. Gradients are cast to the weights' dtype before
    they are summed over microbatches. The results equal those of FSDP2 on one rank bit for bit.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype, *, exact: Collection[nn.Module] = (), keep: bool) -> None:
        """Copy the parameters of ``root`` whose dtype is not ``dtype``, except those of ``exact``.

        With ``keep``, the memory of copies and gradients is kept between uses. Otherwise it is freed, so that an engine
        on the same GPU can use it.
        """
        uncopied = {parameter for module in exact for parameter in module.parameters()}
        self._keep = keep
        self._copies: dict[nn.Parameter, nn.Parameter] = {
            weight: _make_copy(weight, dtype, keep=keep)
            for weight in root.parameters()
            if weight.is_floating_point() and weight.dtype != dtype and weight not in uncopied
        }
        self._places = [  # a tied parameter has several
            (module, name, weight)
            for module in root.modules()
            for name, weight in module._parameters.items()
            if weight in self._copies
        ]
        self._versions = dict.fromkeys(self._copies, -1)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Replace the module's parameters by their copies within the context."""
        self._refresh()
        for module, name, weight in self._places:
            module._parameters[name] = self._copies[weight]
        try:
            yield
        finally:
            for module, name, weight in self._places:
                module._parameters[name] = weight
            if not self._keep:
                for copy in self._copies.values():
                    copy.untyped_storage().resize_(0)

    def replace(self, named: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return ``named`` with the copies, if they are kept, of all weights that have copies in ``dtype``."""
        if not self._keep:
            return dict(named)
        self._refresh()
        copies = {weight: copy for weight, copy in self._copies.items() if copy.dtype == dtype}
        return {name: copies.get(tensor, tensor) for name, tensor in named.items()}  # type: ignore[call-overload]

    @torch.no_grad()
    def _refresh(self) -> None:
        """Cast the weights that have no current copy."""
        changed = [weight for weight in self._copies if not self._keep or self._versions[weight] != weight._version]
        copies: list[Tensor] = [self._copies[weight] for weight in changed]
        if not self._keep:
            for copy in copies:
                copy.untyped_storage().resize_(copy.numel() * copy.element_size())
        if changed:
            torch._foreach_copy_(copies, [*changed])
        self._versions.update((weight, weight._version) for weight in changed)


def _make_copy(weight: nn.Parameter, dtype: torch.dtype, *, keep: bool) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(weight, dtype=dtype), requires_grad=weight.requires_grad)
    buffer = None
    if not keep:
        copy.untyped_storage().resize_(0)
    elif weight.requires_grad:
        # allocated once: on a CPU, new memory for all gradients would cost a page fault per 4 KiB in each step
        buffer = torch.empty_like(weight, requires_grad=False)
    if weight.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_add_gradient, weight, buffer))  # type: ignore[no-untyped-call]
    return copy


def _add_gradient(weight: nn.Parameter, buffer: Tensor | None, copy: Tensor) -> None:
    """Add a microbatch's gradient, which a copy has, to that of its weight, which is stored in ``buffer`` if given."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None, "autograd calls the hook after setting it"
    if weight.grad is not None:
        weight.grad.add_(gradient)
    else:
        weight.grad = gradient.to(weight.dtype) if buffer is None else buffer.copy_(gradient)
