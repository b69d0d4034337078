"""Batch-invariant forward passes of transformers' models: replaces the operations of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from plasmid.errors import ModelError
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from .invariant import linear, row_mean

ACTIVATIONS = frozenset({"gelu", "mish", "sigmoid", "silu", "softplus", "tanh"})
"""Elementwise functions, for which PyTorch uses different code on the CPU for the last elements of a tensor."""
VECTOR = 64
"""PyTorch uses the same code for all elements if their number per row is a multiple of this."""
VARIANT = frozenset(
    [
        "__matmul__",
        "__rmatmul__",
        "_grouped_mm",
        "addbmm",
        "addmm",
        "addmv",
        "baddbmm",
        "bmm",
        "conv1d",
        "conv2d",
        "cumsum",
        "einsum",
        "grouped_mm",
        "index_add",
        "index_add_",
        "log_softmax",
        "logsumexp",
        "matmul",
        "mm",
        "mv",
        "norm",
        "prod",
        "scaled_dot_product_attention",
        "scatter_add",
        "scatter_add_",
        "softmax",
        "std",
        "sum",
        "var",
        "vector_norm",
    ]
)
"""Functions whose order of sums depends on the number of rows."""


class InvariantOps(TorchFunctionMode):
    """Within this context, products and means of rows are batch-invariant; other sums over rows are refused."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "linear":
            return linear(*args, **kwargs)
        if name == "mean":
            return _mean(*args, **kwargs)
        if name in VARIANT:
            raise ModelError(
                f"run.deterministic: the model's layers use torch's {name!r}, which has no batch-invariant kernel here"
                "; remove the setting"
            )
        if name in ACTIVATIONS and args[0].device.type == "cpu":
            width = args[0].shape[-1]
            return func(pad(args[0], (0, -width % VECTOR)), *args[1:], **kwargs)[..., :width]
        return func(*args, **kwargs)


def _mean(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    if dim not in (-1, x.ndim - 1):
        raise ModelError(
            f"run.deterministic: the model's layers compute a mean over dimension {dim}, which has no batch-invariant "
            "kernel here; remove the setting"
        )
    mean = row_mean(x)
    return mean[..., None] if keepdim else mean


def make_invariant(lm: PreTrainedModel) -> None:
    """Make the forward passes of a model's layers and head batch-invariant.

    Attention is not included: register one that calls `call_without_checks`.
    """
    layers = set(lm._no_split_modules or ())
    for module in _units(lm, layers):
        module.forward = _invariant(module.forward)


def _units(module: nn.Module, layers: set[str]) -> Iterator[nn.Module]:
    """Yield the decoder layers, and modules with weights of their own outside of them: norms, embeddings, head."""
    if type(module).__name__ in layers or next(module.parameters(recurse=False), None) is not None:
        yield module
        return
    for child in module.children():
        yield from _units(child, layers)


def _invariant(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with InvariantOps():
            return forward(*args, **kwargs)

    return run


def check_attention(sliding_window: int | None, sinks: Tensor | None) -> None:
    """Raise `ModelError` for attention that the batch-invariant kernel does not compute."""
    if sliding_window is not None or sinks is not None:
        kind = "attention sinks" if sliding_window is None else f"sliding-window attention (window {sliding_window})"
        raise ModelError(
            f"run.deterministic: the model has {kind}, for which there is no batch-invariant kernel; remove the setting"
        )


def call_without_checks(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call an attention function outside of `InvariantOps`."""
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)
