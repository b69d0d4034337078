"""How long a sample may be."""

from __future__ import annotations

from pathlib import Path

from plasmid.config.run import ModelConfig
from plasmid.utils.json_files import read_json


def longest_sample(model: ModelConfig) -> int | None:
    """Tokens that the model takes, prompt included; None if its config does not say."""
    config = read_json(Path(model.path) / "config.json")
    longest = config.get("text_config", config).get("max_position_embeddings")
    limits = [limit for limit in (longest, model.max_length) if isinstance(limit, int)]
    return min(limits, default=None)
