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
    run: Path | None = None
    """Folder of the run, if it lies in one."""


def find_target(path: Path) -> Target:
    """Find out what the path is. Of a run the final policy is taken, or else its newest checkpoint."""
    from plasmid.config.checkpoint import CheckpointConfig
    from plasmid_runtime.checkpoint.folder import STATE, CheckpointFolder, read_state

    if (path / STATE).is_file():
        run = path.absolute().parent.parent
        is_in_run = (run / "config.json").is_file()
        return Target(checkpoint=path, config=read_state(path).config, run=run if is_in_run else None)
    if not (path / "run.json").is_file():
        return Target(model=path)
    config = _recorded(path / "config.json")
    if (path / "final" / "config.json").is_file():
        return Target(model=path / "final", config=config, run=path)
    return Target(
        checkpoint=CheckpointFolder(path / "checkpoints", CheckpointConfig()).newest(), config=config, run=path
    )


def load_target(
    target: Target, items: Sequence[str], plugins: Sequence[Path] | None, *, trust: bool = False
) -> RunConfig:
    """The recipe of the command line, or what is taken of that of the target's run if the command line names none."""
    from plasmid.config.stored_recipe import resolve_stored

    from ..output import print_warning
    from .arguments import load

    model = [] if target.model is None else [f"model.path={json.dumps(str(target.model))}"]
    if target.config is None or any(item.endswith(".toml") and "=" not in item for item in items):
        return load(items, plugins, more=model)
    config, notice = resolve_stored(
        target.config,
        target.checkpoint or target.run or Path(),
        overrides=[*items, *model],
        plugins=plugins or (),
        run=target.run,
        trust=trust,
    )
    if notice:
        print_warning(notice)
    return config


def _recorded(path: Path) -> Mapping[str, Any]:
    from plasmid.errors import ConfigError
    from plasmid.utils.json_text import read_json

    try:
        found = read_json(path)
        if not isinstance(found, Mapping):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the recipe of the run: {error}; name a recipe") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds no recipe; name one")
    return found
