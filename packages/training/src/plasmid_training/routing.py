"""Checks of `routing_replay` before any process starts."""

from __future__ import annotations

from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid_models.routing import read_routing


def check_routing_replay(config: RunConfig) -> None:
    """Raise `ConfigError` if routing is to be replayed for a model without experts."""
    if config.trainer.replays_routing() and read_routing(config.model.path) is None:
        raise ConfigError(f"trainer.routing_replay: {config.model.path} has no experts; remove the setting")
