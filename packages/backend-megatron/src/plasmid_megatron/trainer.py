"""Checks that need no process, and the start of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.components import BuildContext
from plasmid.errors import ConfigError
from plasmid.training.model_folder import read_config
from plasmid.training.model_source import check_models
from plasmid.training.ranked_trainer import RankedTrainer, start_ranks
from plasmid.training.schedule import Microbatching

from .device import check_device
from .launch import RankSetup, launch
from .settings import Megatron

UNEVEN = {
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
}
"""Fields of Megatron that give pipeline ranks different numbers of layers."""


async def start(settings: Megatron, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    _check(settings, context)
    setups = [
        RankSetup(
            config=context.config.model_dump(mode="json"),
            rank=rank,
            num_ranks=len(context.bundles),
            device="cuda" if context.on_gpu else "cpu",
            threads=context.threads,
        )
        for rank in range(len(context.bundles))
    ]
    fixed = settings.microbatch_samples
    microbatching = (
        Microbatching(unit="packed", size=settings.microbatch_tokens)
        if fixed == "auto"
        else Microbatching(unit="samples", size=fixed)
    )
    return await start_ranks(context, launch, setups, microbatching=microbatching)


def _check(settings: Megatron, context: BuildContext) -> None:
    check_device("cuda" if context.on_gpu else "cpu")
    check_models(context.config)
    check_split(settings, read_config("model", Path(context.config.model.path)))


def check_split(settings: Megatron, config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if a model with this ``config.json`` cannot be split as the settings say."""
    chunks = settings.pipeline_parallel * settings.virtual_pipeline
    experts = config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts")
    splits = (
        (
            "num_attention_heads",
            "tensor_parallel x context_parallel",
            settings.tensor_parallel * settings.context_parallel,
        ),
        ("num_key_value_heads", "tensor_parallel", settings.tensor_parallel),
        ("num_hidden_layers", "pipeline_parallel x virtual_pipeline", chunks),
    )
    free = {"num_hidden_layers"} if set(settings.transformer) & UNEVEN else set()
    for name, by, parts in splits:
        count = config.get(name)
        if isinstance(count, int) and count % parts and name not in free:
            raise ConfigError(f"trainer: the model's {name} = {count} cannot be split into {parts} parts ({by})")
    if experts and settings.tensor_parallel > 1 and not settings.splits_sequences:
        raise ConfigError(
            "trainer.sequence_parallel: a model with experts needs it with tensor_parallel; remove the setting"
        )
    if settings.expert_parallel > 1 and (not experts or experts % settings.expert_parallel):
        have = f"{experts} experts" if experts else "no experts"
        raise ConfigError(
            f"trainer.expert_parallel: the model has {have}, which {settings.expert_parallel} ranks cannot share"
        )
