"""Check the recipe before any process is started, and start all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.components import BuildContext
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid_models.folder import read_text_config
from plasmid_models.source import check_models
from plasmid_training.batches.schedule import min_saving
from plasmid_training.driver.ranked_trainer import RankedTrainer, start_ranks

from .settings import CPU_OFFLOAD_ERROR, FSDP

if TYPE_CHECKING:
    from .backend import FSDPBackend


async def start(settings: FSDP, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the models. Raises `ConfigError` or `ModelError` and leaves no process running."""
    if settings.cpu_offload and not context.on_gpu:
        raise ConfigError(CPU_OFFLOAD_ERROR)
    check_models(context.config.view("trainer"))
    # linear attention pads packed samples
    packs = not settings.uses_linear_attention(context.config.needed_models) and settings.attention == "auto"
    share = False if context.config.run.deterministic else settings.share_prefixes
    microbatching = settings.microbatching(
        "packed" if packs else "tokens",
        read_text_config("model", Path(context.config.model.path)),
        min_saving=min_saving(share, on_gpu=context.on_gpu) if packs else None,
    )
    return await start_ranks(context, make_backend, microbatching=microbatching, async_save=settings.async_save)


def make_backend(config: RunConfig, device: str) -> FSDPBackend:
    """Create the backend of one rank, in the rank's process."""
    from .backend import FSDPBackend

    return FSDPBackend(config, device)
