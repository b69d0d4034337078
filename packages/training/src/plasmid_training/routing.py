"""Checks of `routing_replay` before any process starts."""

from __future__ import annotations

from plasmid.components import TrainerConfig
from plasmid.errors import ConfigError
from plasmid_models.routing import read_routing


def check_routing_replay(trainer: TrainerConfig, model: str) -> None:
    """Raise `ConfigError` if routing is to be replayed for a model without experts."""
    if trainer.replays_routing() and read_routing(model) is None:
        raise ConfigError(f"trainer.routing_replay: {model} has no experts; remove the setting")
