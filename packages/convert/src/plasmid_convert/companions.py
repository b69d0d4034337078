"""Companion files of weights: config, tokenizer and other Hugging Face files of the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plasmid.errors import ModelError, one_line
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import copy_file
from plasmid_models.manifest import STATE
from plasmid_models.quantized.formats import is_quantized, remove_quantization
from plasmid_models.tokenization.tokenizer_files import has_tokenizer

PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
CHECKPOINT_FILES = ("metadata.json", "latest_checkpointed_iteration.txt")
"""Files of Megatron checkpoints that match `PATTERNS` but are not companions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """Hugging Face folders of the model that a checkpoint belongs to."""

    model: Path
    tokenizer: Path
    of_run: bool
    """True if a Plasmid run wrote the checkpoint."""

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``. Raises `ModelError`."""
        return read_config(self.model / "config.json")

    def dtype(self, requested: str) -> str | None:
        """Return the dtype to cast to, or None; ``auto`` is that of `rl export` for runs, else None."""
        if requested == "auto" and self.of_run:
            config = self.config()
            return config.get("dtype") or config.get("torch_dtype") or "float32"
        return None if requested in ("auto", "keep") else requested

    def copy(self, target: Path, **changes: Any) -> None:
        """Copy config, tokenizer and other companions; set the keys ``changes`` of the config that are not None."""
        copy_files(self.tokenizer, target)
        copy_files(self.model, target)
        kept = {key: value for key, value in changes.items() if value is not None}
        if kept:
            change_config(target, **kept)


def find_source_model(path: Path, model: str, weights: Path) -> SourceModel:
    """Find a checkpoint's model: the folder ``model``, or for ``auto`` files next to the weights or the run's recipe.

    ``path`` is the path that the user gave, ``weights`` the folder in it with the weights. Raises `ModelError`.
    """
    of_run = next((folder for folder in (weights, weights.parent) if (folder / STATE).is_file()), None)
    if model != "auto":
        folder = Path(model)
        if not (folder / "config.json").is_file():
            raise ModelError(f"from.model: {model} is not a Hugging Face folder (it has no config.json)")
        return SourceModel(model=folder, tokenizer=folder, of_run=of_run is not None)
    for folder in (weights, path, weights.parent):
        if (folder / "config.json").is_file() and folder != of_run:
            return SourceModel(model=folder, tokenizer=folder, of_run=of_run is not None)
    if of_run is None:
        raise ModelError(
            f"{path}: the model is unknown (the folder has no config.json); set its Hugging Face folder with "
            "from.model=FOLDER"
        )
    return _of_run(of_run / STATE)


def _of_run(file: Path) -> SourceModel:
    try:
        model = read_json(file)["config"]["model"]
        folder, tokenizer = Path(model["path"]), model.get("tokenizer", "auto")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: cannot be read: {error!r}") from None
    if tokenizer != "auto" and not has_tokenizer(Path(tokenizer)):  # untrusted: it may name any folder of the user
        raise ModelError(
            f"{file}: the run's tokenizer folder {tokenizer} has no tokenizer; set the model's Hugging Face folder "
            "with from.model=FOLDER"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{file}: the run's model folder {folder} does not exist (searched from {Path.cwd()}); set the model's "
            "Hugging Face folder with from.model=FOLDER"
        )
    return SourceModel(model=folder, tokenizer=folder if tokenizer == "auto" else Path(tokenizer), of_run=True)


def is_of_run(weights: Path) -> bool:
    """Return True if the folder with the weights is the trainer's part of a run's checkpoint."""
    return (weights.parent / STATE).is_file()


def read_config(file: Path) -> dict[str, Any]:
    """Read a ``config.json``. Raises `ModelError`."""
    try:
        found = read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: must contain a JSON object")
    return found


def copy_files(source: Path, target: Path) -> None:
    """Copy all files of a Hugging Face folder except the weights and their index.

    The copied config has no quantization if the weights are in a quantized format that is dequantized when read.
    """
    for pattern in PATTERNS:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and not file.name.endswith(".index.json") and file.name not in CHECKPOINT_FILES:
                copy_file(file, source, target / file.name)
    config = target / "config.json"
    if config.is_file() and is_quantized(read_config(config)):
        config.write_text(json.dumps(remove_quantization(read_config(config)), indent=2) + "\n", encoding="utf-8")


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of a folder's ``config.json``, if it has one."""
    config = folder / "config.json"
    if config.is_file():
        settings = read_config(config)
        if "dtype" in changes:
            settings.pop("torch_dtype", None)  # the older name of the same key
        config.write_text(json.dumps(settings | changes, indent=2) + "\n", encoding="utf-8")
