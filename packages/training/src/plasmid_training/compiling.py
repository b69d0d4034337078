"""Compilation of decoder layers with `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

MAX_GRAPHS = 24
"""Maximum number of graphs of one function; beyond it, `torch.compile` runs the function eagerly. A layer needs a graph
for each combination of: packed rows, shared prefixes, dense blocks of one or of several samples; and which parameters
of the model are frozen."""


def compile_layers(layers: Iterable[nn.Module], *, memory_budget: float) -> None:
    """Compile the forward pass of each layer for any sequence length.

    Compiles the method, not the module: hooks stay outside of the graph, which all layers share. ``memory_budget`` is
    the fraction of the layers' activations that is kept for the backward pass, from 0 (their inputs) to 1; the compiler
    chooses which others to recompute, the cheapest first. It applies to all compiled layers of the process.
    """
    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    # compile floats, such as an adapter's scale, as constants: as inputs of a graph, AOTAutograd rejects some of them
    # after tracing the whole layer, TorchDynamo traces it again, and the cache misses the first attempt every time
    torch._dynamo.config.specialize_float = True
    # cache graphs with custom autograd functions on disk, too; the key includes their traced forward and backward
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    torch._functorch.config.activation_memory_budget = memory_budget
    _remove_size_guard()
    for layer in layers:
        layer.forward = _use_training_graph(layer, torch.compile(layer.forward, dynamic=True))


def _use_training_graph(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that computes with the graph for training also while gradients are disabled.

    Otherwise, scores would need a second graph, which takes 7 s to compile on an H200, and would differ from the
    log-probabilities in training by rounding. What the graph keeps for its backward pass is freed after each layer.
    """

    @functools.wraps(forward)
    def run(*args: Any, **options: Any) -> Any:
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            return forward(*args, **options)
        is_training = torch.is_grad_enabled()
        with torch.enable_grad():
            args, options = _with_hidden_states(_alias if is_training else _require_gradient, args, options)
            output = forward(*args, **options)
            return output if is_training else tree_map_only(Tensor, Tensor.detach, output)

    return run


def _with_hidden_states(
    change: Callable[[Tensor], Tensor], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change hidden states, which are the first argument or the one with this name."""
    if "hidden_states" in options:
        return args, options | {"hidden_states": change(options["hidden_states"])}
    return (change(args[0]), *args[1:]), options


def _require_gradient(hidden: Tensor) -> Tensor:
    return hidden.detach().requires_grad_()


def _alias(hidden: Tensor) -> Tensor:
    alias: Tensor = _Alias.apply(hidden)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    """Identity whose output is not a view.

    TorchDynamo guards the sizes of the tensor that an input is a view of. Hooks that shard layers turn hidden states
    into views, but only in training, and embeddings may be views, so each would need a separate graph.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _remove_size_guard() -> None:
    """Make TorchInductor fuse the reductions of a norm's backward pass for any number of tokens.

    By default it does so from 5 x 2^20 elements (5,120 tokens of 1,024), and the first microbatch on the other side of
    this limit needs a second training graph. Releases without the option have no such limit.
    """
    triton = torch._inductor.config.triton
    if hasattr(triton, "mix_order_reduction_non_strict_mode"):
        triton.mix_order_reduction_non_strict_mode = True


def count_graphs() -> dict[str, float]:
    """Return ``train/graphs``, the number of graphs that `torch.compile` has made in this process; empty if 0."""
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"train/graphs": float(count)} if count else {}
