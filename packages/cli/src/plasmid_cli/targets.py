"""What `rl eval --model` may name: a model folder, the folder of a run, or one of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plasmid import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is evaluated."""

    model: Path | None = None
    """Hugging Face folder."""
    checkpoint: Path | None = None
    """Or a checkpoint, which only the trainer that wrote it can read."""
    config: Mapping[str, Any] | None = None
    """Resolved recipe of its run, if it comes from one."""


def find_target(path: Path) -> Target:
    """Find out what the path is. Of a run the final policy is taken, or else its newest checkpoint."""
    from plasmid.config import CheckpointConfig
    from plasmid.run.checkpoint import STATE, CheckpointFolder, read_state

    if (path / STATE).is_file():
        return Target(checkpoint=path, config=read_state(path).config)
    if not (path / "run.json").is_file():
        return Target(model=path)
    config = _recorded(path / "config.json")
    if (path / "final" / "config.json").is_file():
        return Target(model=path / "final", config=config)
    return Target(checkpoint=CheckpointFolder(path / "checkpoints", CheckpointConfig()).newest(), config=config)


def load_target(target: Target, items: Sequence[str], plugins: Sequence[Path] | None) -> RunConfig:
    """The recipe of the command line, or that of the target's run if the command line names none."""
    from plasmid.recipe import merge, parse_override, resolve

    from .recipe_arguments import load

    model = [] if target.model is None else [f"model.path={json.dumps(str(target.model))}"]
    if target.config is None or any(item.endswith(".toml") and "=" not in item for item in items):
        return load(items, plugins, more=model)
    data = dict(target.config)
    for override in [*items, *model]:
        data = merge(data, parse_override(override))
    data["plugins"] = [*data.get("plugins", ()), *map(str, plugins or ())]
    return resolve(data)


def _recorded(path: Path) -> Mapping[str, Any]:
    from plasmid.errors import ConfigError

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the recipe of the run: {error}; name a recipe") from None
    return dict(found)
