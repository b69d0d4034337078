"""What lies in a Hugging Face folder, read without torch: its config, its weight files, and what travels with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.config.run import ModelConfig
from plasmid.errors import ModelError
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import copy_file, in_folder

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANION_SUFFIXES = {".json", ".jinja", ".model", ".py", ".txt"}
NOT_COMPANIONS = {INDEX, "pytorch_model.bin.index.json", "metadata.json"}
OF_TORCH_DIST = (".metadata", "metadata.json")


def is_torch_dist(path: Path) -> bool:
    """True if the folder's weights are in Megatron's distributed format."""
    return all((path / name).is_file() for name in OF_TORCH_DIST)


def check_folder(where: str, path: Path, *, torch_dist: bool = False) -> None:
    """Raises `ModelError` unless the folder has a config and readable weight files. ``where`` is the recipe's table.

    With ``torch_dist`` the weights may be in Megatron's distributed format, which is not looked into.
    """
    read_config(where, path)
    if not is_torch_dist(path):
        weight_files(where, path)
    elif not torch_dist:
        raise ModelError(
            f"{where}.path: {path} is of Megatron's distributed format, which trainer 'megatron' alone reads; make a "
            f"Hugging Face folder of it: rl convert {path} FOLDER"
        )


def read_config(where: str, path: Path) -> dict[str, Any]:
    """The folder's ``config.json``."""
    if not path.is_dir():
        raise ModelError(f"{where}.path: no such folder: {path}")
    return _read_json(where, path / "config.json", "it must be a Hugging Face model folder")


def dtype_of(where: str, path: Path) -> str:
    """The torch name of the dtype that the folder's config says its weights have."""
    config = read_config(where, path)
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def weight_files(where: str, path: Path) -> tuple[Path, ...]:
    """Every safetensors file of the folder's weights."""
    index = path / INDEX
    if index.is_file():
        weight_map = _read_json(where, index, "").get("weight_map", {})
        files = tuple(path / in_folder(index, str(name)) for name in sorted(set(weight_map.values())))
    else:
        files = (path / SINGLE,)
    for file in files:
        if not file.is_file():
            hint = "convert the folder with `rl convert`" if any(path.glob("*.bin")) else "the folder is incomplete"
            raise ModelError(f"{where}.path: {path} has no weights: {file.name} is missing; {hint}")
    return files


def tensor_names(where: str, path: Path) -> set[str]:
    """Of the folder's weights. Raises `ModelError`."""
    from safetensors import SafetensorError, safe_open

    names: set[str] = set()
    for file in weight_files(where, path):
        try:
            with safe_open(file, framework="numpy") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None
    return names


def longest_sample(model: ModelConfig) -> int | None:
    """Tokens that the model takes, prompt included; None if its config does not say."""
    config = read_json(Path(model.path) / "config.json")
    longest = config.get("text_config", config).get("max_position_embeddings")
    limits = [limit for limit in (longest, model.max_length) if isinstance(limit, int)]
    return min(limits, default=None)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what lies beside the weights: config, tokenizer, chat template, generation settings, model code."""
    for file in companions(source):
        copy_file(file, source, target / file.name)


def companions(folder: Path) -> list[Path]:
    """The files that `copy_companions` copies."""
    named = (f for f in folder.iterdir() if f.suffix in COMPANION_SUFFIXES and f.name not in NOT_COMPANIONS)
    return sorted(file for file in named if file.is_file())


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Settings that change what weights mean and differ between two configs, as ``key: ours != theirs``."""
    about_files = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
    keys = sorted((ours.keys() | theirs.keys()) - about_files)
    keys = [key for key in keys if not key.endswith("_token_id")]
    return [f"{key}: {ours.get(key)!r} != {theirs.get(key)!r}" for key in keys if ours.get(key) != theirs.get(key)]


def _read_json(where: str, file: Path, hint: str) -> dict[str, Any]:
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise ModelError(f"{where}.path: {file.parent} has no {file.name}; {hint}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{where}.path: {file} must hold a JSON object")
    return content
