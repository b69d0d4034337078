"""Checks that need no process, and the start of all ranks."""

from __future__ import annotations

from pathlib import Path

from plasmid import RunConfig
from plasmid.components import BuildContext
from plasmid_models.folder import read_config
from plasmid_models.source import check_models
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.number_type import config_of_ranks
from plasmid_training.ranked_trainer import RankedTrainer, start_ranks

from .device import check_device, check_transformer_engine
from .launch import RankSetup, launch
from .settings import Megatron
from .shapes import check_split


async def start(settings: Megatron, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    check(settings, context.config, "cuda" if context.on_gpu else "cpu")
    config = config_of_ranks(context)
    setups = [
        RankSetup(
            config=config,
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
    return await start_ranks(context, launch, setups, microbatching=microbatching, saves_behind=settings.async_save)


def check(settings: Megatron, config: RunConfig, device: str | None) -> None:
    """Raise `ConfigError` or `ModelError` for what cannot be trained; ``device`` is None where nobody knows it yet."""
    if device is not None:
        check_device(device)
    if settings.transformer_engine and device is not None:
        check_transformer_engine(device)
    check_models(config, torch_dist=True)
    check_split(settings, read_config("model", Path(config.model.path)))
