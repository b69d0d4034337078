"""Checks that need no process, and the start of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from plasmid import RunConfig
from plasmid.components import BuildContext
from plasmid_models.folder import read_config
from plasmid_models.source import check_models
from plasmid_training.batches.schedule import Microbatching
from plasmid_training.ranked_trainer import RankedTrainer, start_ranks

from .device import check_device, check_transformer_engine, prepare_cpu
from .settings import Megatron
from .shapes import check_split

if TYPE_CHECKING:
    from .backend import MegatronBackend


async def start(settings: Megatron, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the model. Raises `ConfigError` and `ModelError`; nothing is left running then."""
    check(settings, context.config, "cuda" if context.on_gpu else "cpu")
    multiple = settings.pipeline_parallel if settings.virtual_pipeline > 1 else 1
    fixed = settings.microbatch_samples
    microbatching = (
        Microbatching(unit="packed", size=settings.microbatch_tokens, multiple=multiple)
        if fixed == "auto"
        else Microbatching(unit="samples", size=fixed, multiple=multiple)
    )
    return await start_ranks(context, make_backend, microbatching=microbatching, saves_behind=settings.async_save)


def make_backend(config: RunConfig, device: str) -> MegatronBackend:
    """Make the backend of one rank, in its own process."""
    if device == "cpu":
        prepare_cpu()  # before anything imports megatron
    from .backend import MegatronBackend

    return MegatronBackend(config, device)


def check(settings: Megatron, config: RunConfig, device: str | None) -> None:
    """Raise `ConfigError` or `ModelError` for what cannot be trained; ``device`` is None where nobody knows it yet."""
    if device is not None:
        check_device(device)
    if settings.transformer_engine and device is not None:
        check_transformer_engine(device)
    check_models(config, torch_dist=True)
    check_split(settings, read_config("model", Path(config.model.path)))
