"""Layers that `torch.compile` captures in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from plasmid.errors import ConfigError
from plasmid_training.compiling import compile_layers
from plasmid_training.learning_settings import NOT_COMPILED_ERROR
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from ..settings import Megatron


def compile_chunk(chunk: nn.Module, settings: Megatron, config: TransformerConfig) -> None:
    """Compile the layers of a model chunk, which is on its device, if the settings ask for it."""
    is_on_gpu = next(chunk.parameters()).is_cuda
    if not (compiles_by_default(settings, config) and is_on_gpu if settings.compile == "auto" else settings.compile):
        if settings.activation_memory_budget < 1:
            raise ConfigError(NOT_COMPILED_ERROR)
        return
    layers = chunk.decoder.layers  # type: ignore[union-attr]
    for layer in layers:  # type: ignore[union-attr]
        _prepare(layer, splits_weights=settings.tensor_parallel > 1)
    if chunk.pre_process:
        chunk.embedding.register_forward_hook(_set_strides)  # type: ignore[union-attr]
    compile_layers(layers, memory_budget=settings.activation_memory_budget)  # type: ignore[arg-type]


def compiles_by_default(settings: Megatron, config: TransformerConfig) -> bool:
    """Return True if the layers fit into one graph: they are dense, not recurrent, and do not communicate."""
    splits = settings.tensor_parallel > 1 or settings.context_parallel > 1
    is_linear = config.linear_attention_freq is not None
    return not (splits or config.num_moe_experts or is_linear or settings.transformer_engine)


def _multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None, **communication: Any) -> Tensor:
    """Compute Megatron's linear layer on one rank, without the options for several, which `torch.compile` rejects."""
    return linear(input, weight, bias)


def _prepare(layer: Any, *, splits_weights: bool) -> None:
    """Replace the parts of a layer that cause graph breaks."""
    if not splits_weights:
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module._forward_impl = _multiply
    for owner, flag, part in (
        (layer.self_attention, "checkpoint_core_attention", layer.self_attention.core_attention),
        (layer, "recompute_mlp", layer.mlp),
    ):
        if getattr(owner, flag):
            setattr(owner, flag, False)
            part.forward = _recompute(part.forward)


def _recompute(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward pass: the backward pass recomputes it, with a checkpointing that `torch.compile` captures."""

    def run(*args: Any, **options: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _set_strides(module: nn.Module, inputs: Any, hidden: Tensor) -> Tensor:
    """Give [T, 1, H] embeddings the strides of a layer's output; otherwise the first layer needs its own graphs."""
    return hidden[:, 0, None]
