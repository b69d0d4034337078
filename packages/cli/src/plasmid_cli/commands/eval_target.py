"""Targets of `rl eval --model`: a model folder, a run folder, or a checkpoint."""

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
    """The model or checkpoint to evaluate."""

    model: Path | None = None
    """Hugging Face folder."""
    checkpoint: Path | None = None
    """Checkpoint, which only the trainer that wrote it can read."""
    config: Mapping[str, Any] | None = None
    """Resolved recipe of its run, if any."""
    run: Path | None = None
    """Folder of its run, if any."""


def find_target(path: Path) -> Target:
    """Determine the target. For a run, this is the final policy, or otherwise the newest checkpoint.

    Raises `ConfigError` if there is none, and `CheckpointError` if it is damaged.
    """
    from plasmid.config.loop import CheckpointConfig
    from plasmid.errors import ConfigError
    from plasmid.settings.trust import is_hub_model
    from plasmid.utils.addresses import redact_url
    from plasmid_models.manifest import STATE
    from plasmid_runtime.checkpoint.folder import CheckpointFolder, read_state

    if (path / STATE).is_file():
        run = path.absolute().parent.parent
        is_in_run = (run / "config.json").is_file()
        return Target(checkpoint=path, config=read_state(path).config, run=run if is_in_run else None)
    if ":/" in str(path):
        raise ConfigError(f"--model {redact_url(str(path))}: is an address; give the address of a server with --url")
    if not path.exists() and not is_hub_model(str(path)):
        raise ConfigError(f"--model {path}: no such folder; give a model folder, a run folder or a checkpoint")
    if (path / "trainer").is_dir() and not (path / "config.json").exists():
        read_state(path)  # raises the error of a checkpoint without its state
    if not (path / "run.json").is_file():
        return Target(model=path)
    config = _read_recipe(path / "config.json")
    if (path / "final" / "config.json").is_file():
        return Target(model=path / "final", config=config, run=path)
    return Target(
        checkpoint=CheckpointFolder(path / "checkpoints", CheckpointConfig()).find_newest(), config=config, run=path
    )


def load_target(
    target: Target, items: Sequence[str], plugins: Sequence[Path] | None, *, trust: bool = False
) -> RunConfig:
    """Load the recipe of the command line or, if there is none, the trusted part of the target's own recipe."""
    from plasmid.config.stored_recipe import resolve_stored
    from plasmid.errors import ConfigError
    from plasmid_runtime.checkpoint.folder import check_intact

    from ..output import print_warning
    from .arguments import load

    model = [] if target.model is None else [f"model.path={json.dumps(str(target.model))}"]
    if target.config is None or any(item.endswith(".toml") and "=" not in item for item in items):
        return load(items, plugins, more=model)
    try:
        config, notice = resolve_stored(
            target.config,
            target.checkpoint or target.run or Path(),
            overrides=[*items, *model],
            plugins=plugins or (),
            run=target.run,
            trust=trust,
        )
    except ConfigError:
        if target.checkpoint is not None:
            check_intact(target.checkpoint)  # damage explains many errors of a recipe
        raise
    if notice:
        print_warning(notice)
    return config


def _read_recipe(path: Path) -> Mapping[str, Any]:
    from plasmid.errors import ConfigError
    from plasmid.utils.json_text import read_json

    try:
        found = read_json(path)
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        return found
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the recipe of the run: {error}; give a recipe") from None
