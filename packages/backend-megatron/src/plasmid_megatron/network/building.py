"""Building and loading of this rank's part of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from plasmid.errors import ModelError
from plasmid_models.source import Source
from torch import nn

from ..lora.adapter import ParallelAdapter
from ..model.compiled import compile_chunk
from ..model.transformer_engine import mark_parts
from ..settings import Megatron
from ..weights.bridge import Architecture
from ..weights.shards import HEAD, freeze, load_weights, weights
from .language_model import LanguageModel, ValueModel
from .network import Network


def build_language_model(
    source: Source, architecture: Architecture, settings: Megatron, *, trained: bool = False, seed: int = 0
) -> Network:
    """Load a model folder; no rank ever holds the whole model. ``seed`` initializes a new adapter of a trained model.

    Raises `ModelError`.
    """
    chunks = _build(
        settings,
        architecture.config,
        lambda chunk: LanguageModel(source, architecture, chunk=chunk, chunk_size=settings.logprob_chunk),
    )
    load_weights(chunks, architecture, source.path, where=source.where, trained=trained and settings.lora is None)
    if trained and settings.lora is not None:
        adapter = ParallelAdapter(chunks, architecture, settings.lora, source)
        adapter.fill(seed=seed)
        return Network(chunks, architecture, settings, settings, adapter=adapter)
    if trained:
        freeze(chunks, architecture, settings.freeze, "trainer.freeze")
    else:
        for chunk in chunks:
            chunk.requires_grad_(False)
    return Network(chunks, architecture, settings, settings)


def build_value_model(source: Source, architecture: Architecture, settings: Megatron, *, seed: int) -> Network:
    """Load the backbone of a model folder, and its value head if it has one.

    Otherwise the head's weights are sampled from a normal distribution, the same for any layout, and its bias is 0.
    Raises `ModelError`.
    """
    chunks = _build(settings, architecture.config, lambda chunk: ValueModel(source, architecture, chunk=chunk))
    absent = load_weights(
        chunks,
        architecture,
        source.path,
        where=source.where,
        trained=True,
        optional=(f"{HEAD}weight", f"{HEAD}bias"),
        ignored=("lm_head.weight",),
    )
    for weight in weights(chunks):
        if weight.name in absent:
            drawn = torch.zeros(weight.tensor.shape)
            if drawn.ndim > 1:
                drawn.normal_(0.0, settings.critic.head_std, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                weight.tensor.copy_(drawn)
    freeze(chunks, architecture, settings.critic.freeze, "trainer.critic.freeze")
    return Network(chunks, architecture, settings, settings.critic)


def _build(settings: Megatron, config: TransformerConfig, make: Callable[[int | None], nn.Module]) -> list[nn.Module]:
    numbers = [None] if settings.chunks_per_stage is None else list(range(settings.chunks_per_stage))
    try:
        chunks = [make(number) for number in numbers]
    except (AssertionError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"trainer: Megatron cannot build this model with the parallel layout: {first}") from None
    for chunk, number in zip(chunks, numbers, strict=True):
        if settings.transformer_engine:
            mark_parts(chunk)
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if number is not None:
            chunk.vp_stage = number  # type: ignore[assignment]
        chunk.to(torch.cuda.current_device())
        chunk.train()
        compile_chunk(chunk, settings, config)
    return chunks
