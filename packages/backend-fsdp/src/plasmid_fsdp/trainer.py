"""Checks that need no process, and the start of all ranks."""

from __future__ import annotations

from plasmid.components import BuildContext
from plasmid.errors import ConfigError
from plasmid_models.source import check_models
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.number_type import config_of_ranks
from plasmid_training.ranked_trainer import RankedTrainer, start_ranks

from .launch import RankSetup, Shard, launch
from .settings import FSDP, ON_CPU


async def start(settings: FSDP, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    _check(settings, context)
    config = config_of_ranks(context)
    setups = [
        RankSetup(
            config=config,
            shard=Shard(rank=rank, num_ranks=len(context.bundles)),
            device="cuda" if context.on_gpu else "cpu",
            threads=context.threads,
        )
        for rank in range(len(context.bundles))
    ]
    fixed = settings.microbatch_samples
    microbatching = (
        Microbatching(unit="packed" if settings.attention == "auto" else "tokens", size=settings.microbatch_tokens)
        if fixed == "auto"
        else Microbatching(unit="samples", size=fixed)
    )
    return await start_ranks(context, launch, setups, microbatching=microbatching)


def _check(settings: FSDP, context: BuildContext) -> None:
    if settings.cpu_offload and not context.on_gpu:
        raise ConfigError(ON_CPU)
    check_models(context.config)
