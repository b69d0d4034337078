"""Checks that need no process, and the start of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plasmid.components import BuildContext
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid_models.source import check_models
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.ranked_trainer import RankedTrainer, start_ranks

from .settings import FSDP, ON_CPU

if TYPE_CHECKING:
    from .backend import FSDPBackend


async def start(settings: FSDP, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    if settings.cpu_offload and not context.on_gpu:
        raise ConfigError(ON_CPU)
    check_models(context.config)
    fixed = settings.microbatch_samples
    microbatching = (
        Microbatching(unit="packed" if settings.attention == "auto" else "tokens", size=settings.microbatch_tokens)
        if fixed == "auto"
        else Microbatching(unit="samples", size=fixed)
    )
    return await start_ranks(context, make_backend, microbatching=microbatching)


def make_backend(config: RunConfig, device: str) -> FSDPBackend:
    """Make the backend of one rank, in its own process."""
    from .backend import FSDPBackend

    return FSDPBackend(config, device)
