"""Read Hugging Face model folders without torch: config, weight files, companion files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from plasmid.config.run import ModelConfig
from plasmid.errors import ModelError, abbreviate
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import check_entries, check_in_folder, copy_file

from .quantized.formats import KEY, Format, weight_format
from .text_model import FolderNames, has_vision, text_config

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
COMPANION_SUFFIXES = {".json", ".jinja", ".model", ".py", ".txt"}
NOT_COMPANIONS = {INDEX, "pytorch_model.bin.index.json", "metadata.json"}
TORCH_DIST_FILES = (".metadata", "metadata.json")


def is_torch_dist(path: Path) -> bool:
    """Return True if the folder's weights are in Megatron's distributed format."""
    return all((path / name).is_file() for name in TORCH_DIST_FILES)


def check_folder(where: str, path: Path, *, torch_dist: bool = False) -> None:
    """Raise `ModelError` unless the folder has a config and weight files; ``where`` is the table of the recipe.

    With ``torch_dist`` the weights may be in Megatron's distributed format, whose files are not checked.
    """
    config = read_config(where, path)
    if not is_torch_dist(path):
        read_format(where, config)
        weight_files(where, path)
    elif not torch_dist:
        raise ModelError(describe_torch_dist(where, path, "only trainer 'megatron' reads"))
    elif has_vision(config):
        raise ModelError(
            f"{where}.path: {path} has Megatron's distributed format, but its config.json has a vision model, whose "
            "weights the format does not contain; use the Hugging Face folder"
        )


def describe_torch_dist(where: str, path: str | Path, reason: str) -> str:
    """Return the error for a model in Megatron's distributed format where only Hugging Face folders can be read."""
    return (
        f"{where}.path: {path} has Megatron's distributed format, which {reason}; convert it to a Hugging Face folder: "
        f"rl convert {path} FOLDER"
    )


def read_config(where: str, path: Path) -> dict[str, Any]:
    """Read the folder's ``config.json``. Raises `ModelError`."""
    if not path.is_dir():
        raise ModelError(f"{where}.path: no such folder: {path}")
    try:
        check_entries(path)
    except OSError as error:
        raise ModelError(f"{where}.path: {error.filename}: {error.strerror}; remove it") from error
    return _read_json(where, path / "config.json", "it must be a Hugging Face model folder")


def read_text_config(where: str, path: Path) -> dict[str, Any]:
    """Read the configuration of the folder's text model. Raises `ModelError`."""
    return text_config(read_config(where, path))


def read_format(where: str, config: Mapping[str, Any]) -> Format | None:
    """Return the format of quantized weights; None if unquantized. Raises `ModelError` for unsupported formats."""
    try:
        return weight_format(config)
    except ValueError as error:
        raise ModelError(f"{where}.path: {error}") from None


def dtype_of(where: str, path: Path) -> str:
    """Return the torch name of the weights' dtype according to the folder's config."""
    config = read_config(where, path)
    return config.get("dtype") or config.get("torch_dtype") or "float32"


def weight_files(where: str, path: Path) -> tuple[Path, ...]:
    """Return all safetensors files of the folder. Raises `ModelError` if one is missing."""
    index = path / INDEX
    if index.is_file():
        weight_map = _read_json(where, index, "").get("weight_map", {})
        files = tuple(path / check_in_folder(index, str(name)) for name in sorted(set(weight_map.values())))
    else:
        files = (path / SINGLE,)
    for file in files:
        if not file.is_file():
            hint = "convert the folder with `rl convert`" if any(path.glob("*.bin")) else "the folder is incomplete"
            raise ModelError(f"{where}.path: {path} has no weights: {file.name} is missing; {hint}")
    return files


def tensor_names(where: str, path: Path) -> set[str]:
    """Return the names of all tensors of `open_weights`. Raises `ModelError`."""
    with open_weights(where, path, framework="numpy") as found:
        return set(found)


def folder_names(where: str, path: Path) -> FolderNames:
    """Return the names of the text model's tensors in the folder. Raises `ModelError`."""
    config = read_config(where, path)
    if not has_vision(config):  # the config suffices; the folder may have no weights
        return FolderNames.of(config, ())
    with open_folder(where, path, framework="numpy") as found:
        return FolderNames.of(config, found)


@contextmanager
def open_weights(where: str, path: Path, *, framework: Literal["pt", "numpy"] = "pt") -> Iterator[dict[str, Any]]:
    """Yield lazy slices of the text model's tensors by their names in that model, without untrained tensors.

    Raises `ModelError`.
    """
    with open_folder(where, path, framework=framework) as found:
        names = FolderNames.of(read_config(where, path), found)
        owned = ((names.in_model(name), part) for name, part in found.items())
        yield {name: part for name, part in owned if name is not None}


@contextmanager
def open_folder(where: str, path: Path, *, framework: Literal["pt", "numpy"] = "pt") -> Iterator[dict[str, Any]]:
    """Yield lazy slices of all tensors of the folder by name; indexing one reads it. Raises `ModelError`.

    Quantized weights are dequantized when read (`QuantizedSlice`), and have the names of unquantized weights.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Any] = {}
    quantized = read_format(where, read_config(where, path))
    with ExitStack() as stack:
        for file in weight_files(where, path):
            try:
                opened = stack.enter_context(safe_open(file, framework=framework))
                found |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None
        try:
            found = found if quantized is None else quantized.plain_slices(found)
        except ValueError as error:
            raise ModelError(f"{where}.path: the weights in {path} cannot be read: {error}") from None
        yield found


def find_misfit(
    found: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, ignored: Collection[str] = ()
) -> str:
    """Return how the slices ``found`` differ from the model's ``shapes``, as ``lacks a, b``; empty if they match."""
    others = [
        f"{name} is {list(found[name].get_shape())} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in found and tuple(found[name].get_shape()) != tuple(shape)
    ]
    missing = [name for name in shapes if name not in found]
    surplus = [name for name in found if name not in shapes and name not in ignored]
    for what, names in (("lacks", missing), ("has unknown", surplus), ("has different shapes:", others)):
        if names:
            return f"{what} {abbreviate(names)}"
    return ""


def longest_sample(model: ModelConfig) -> int | None:
    """Return the maximum sample length in tokens, prompt included; None if config and recipe set no limit. Raises
    `ModelError` if the config cannot be read."""
    longest = read_text_config("model", Path(model.path)).get("max_position_embeddings")
    limits = [limit for limit in (longest, model.max_length) if isinstance(limit, int)]
    return min(limits, default=None)


def copy_companions(source: Path, target: Path) -> None:
    """Copy all files except weights: config, tokenizer, chat template, generation settings, model code."""
    for file in list_companions(source):
        copy_file(file, source, target / file.name)


def list_companions(folder: Path) -> list[Path]:
    """Return the files that `copy_companions` copies."""
    named = (f for f in folder.iterdir() if f.suffix in COMPANION_SUFFIXES and f.name not in NOT_COMPANIONS)
    return sorted(file for file in named if file.is_file())


def describe_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the differing settings of two configs that affect how weights are used, as ``key: ours != theirs``."""
    about_files = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", KEY}
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
        raise ModelError(f"{where}.path: {file} must contain a JSON object")
    return content
