"""What travels beside weights: the Hugging Face files that say which model they are of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.errors import ModelError, one_line
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import copy_file
from plasmid_models.tokenization.tokenizer_files import has_tokenizer

PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
OF_WEIGHTS = ("metadata.json", "latest_checkpointed_iteration.txt")
"""Files of Megatron's that have such names."""
STATE = "state.json"
"""In the folder of a run's checkpoint, around the trainer's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The Hugging Face folders that belong to a checkpoint."""

    model: Path
    tokenizer: Path
    of_run: bool
    """True if the checkpoint is one of a run of ours."""

    def config(self) -> dict[str, Any]:
        """``config.json``. Raises `ModelError`."""
        return read_config(self.model / "config.json")

    def dtype(self, asked: str) -> str | None:
        """What floats become: ``auto`` is the type that `rl export` writes for runs, and none for other checkpoints."""
        if asked == "auto" and self.of_run:
            config = self.config()
            return config.get("dtype") or config.get("torch_dtype") or "float32"
        return None if asked in ("auto", "keep") else asked

    def copy(self, target: Path, **changes: Any) -> None:
        """Write config, tokenizer and the like into a folder; ``changes`` of None leave the config as it is."""
        copy_files(self.tokenizer, target)
        copy_files(self.model, target)
        kept = {key: value for key, value in changes.items() if value is not None}
        if kept:
            change_config(target, **kept)


def described(path: Path, model: str, weights: Path) -> Described:
    """Which model a checkpoint is of: ``model`` says it, or ``auto``: files beside its weights, or the run's recipe.

    ``path`` is what the user has named, ``weights`` the folder in it with the weights. Raises `ModelError`.
    """
    of_run = next((folder for folder in (weights, weights.parent) if (folder / STATE).is_file()), None)
    if model != "auto":
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise ModelError(f"from.model: {model} is no Hugging Face folder (it has no config.json)")
        return Described(model=folder, tokenizer=folder, of_run=of_run is not None)
    for folder in (weights, path, weights.parent):
        if (folder / "config.json").is_file() and folder != of_run:
            return Described(model=folder, tokenizer=folder, of_run=of_run is not None)
    if of_run is None:
        raise ModelError(
            f"{path}: nothing says which model it is of (there is no config.json in it); name the model's Hugging "
            "Face folder with from.model=FOLDER"
        )
    return _of_run(of_run / STATE)


def _of_run(file: Path) -> Described:
    try:
        model = read_json(file)["config"]["model"]
        folder, tokenizer = Path(model["path"]), model.get("tokenizer", "auto")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error!r}") from None
    if tokenizer != "auto" and not has_tokenizer(Path(tokenizer)):  # it may name any folder of the user's
        raise ModelError(
            f"{file}: says that the run's tokenizer is in {tokenizer}, where there is none; name the model's Hugging "
            "Face folder with from.model=FOLDER"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{file}: says that the run's model is {folder}, which is not there seen from {Path.cwd()}; name the "
            "model's Hugging Face folder with from.model=FOLDER"
        )
    return Described(model=folder, tokenizer=folder if tokenizer == "auto" else Path(tokenizer), of_run=True)


def is_of_run(weights: Path) -> bool:
    """True if the folder with weights is the trainer's part of a run's checkpoint."""
    return (weights.parent / STATE).is_file()


def read_config(file: Path) -> dict[str, Any]:
    """A ``config.json``. Raises `ModelError`."""
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: must hold a JSON object")
    return found


def copy_files(source: Path, target: Path) -> None:
    """Copy all that is no weight of a Hugging Face folder."""
    for pattern in PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json") and file.name not in OF_WEIGHTS:
                copy_file(file, source, target / file.name)


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of a folder's ``config.json``, if it has one."""
    config = folder / "config.json"
    if config.is_file():
        settings = read_config(config)
        if "dtype" in changes:
            settings.pop("torch_dtype", None)  # the older name of the same key
        config.write_text(json.dumps(settings | changes, indent=2) + "\n", encoding="utf-8")
