"""Check the recipe before any process is started, and start all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid import RunConfig
from plasmid.components import BuildContext, RecipeView
from plasmid.errors import ConfigError
from plasmid_models.folder import read_text_config
from plasmid_models.linear_attention import has_linear_attention
from plasmid_models.source import check_models
from plasmid_training.batches.schedule import min_saving
from plasmid_training.driver.ranked_trainer import RankedTrainer, start_ranks
from plasmid_training.routing import check_routing_replay

from .device import check_device, check_transformer_engine, prepare_cpu
from .settings import Megatron
from .shapes import check_split

if TYPE_CHECKING:
    from .backend import MegatronBackend


async def start(settings: Megatron, context: BuildContext) -> RankedTrainer:
    """Start all ranks and load the models. Raises `ConfigError` or `ModelError` and leaves no process running."""
    check(settings, context.config.view("trainer"), "cuda" if context.on_gpu else "cpu")
    multiple = settings.pipeline_parallel if settings.virtual_pipeline > 1 else 1
    model = read_text_config("model", Path(context.config.model.path))
    saving = min_saving(settings.share_prefixes, on_gpu=context.on_gpu)
    shares = settings.sharing_obstacle(model) is None
    unit: Literal["tokens", "packed"] = "tokens" if has_linear_attention(model) else "packed"  # it pads samples
    microbatching = settings.microbatching(unit, model, multiple=multiple, min_saving=saving if shares else None)
    return await start_ranks(context, make_backend, microbatching=microbatching, async_save=settings.async_save)


def make_backend(config: RunConfig, device: str) -> MegatronBackend:
    """Create the backend of one rank, in the rank's process."""
    if device == "cpu":
        prepare_cpu()  # before anything imports megatron
    from .backend import MegatronBackend

    return MegatronBackend(config, device)


def check(settings: Megatron, recipe: RecipeView, device: str | None) -> None:
    """Raise `ConfigError` or `ModelError` if the recipe cannot be trained; ``device`` is None if not yet known."""
    if device is not None:
        check_device(device)
    if settings.transformer_engine and device is not None:
        check_transformer_engine(device)
    check_models(recipe, torch_dist=True)
    check_routing_replay(settings, recipe.model.path)
    model = read_text_config("model", Path(recipe.model.path))
    check_split(settings, model)
    settings.check_start(recipe)
    obstacle = settings.sharing_obstacle(model)
    if settings.share_prefixes is True and obstacle:
        raise ConfigError(f"trainer.share_prefixes: {obstacle}; remove the setting")
