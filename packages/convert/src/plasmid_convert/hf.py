"""Hugging Face folders: ``config.json``, safetensors, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from plasmid.components import Converter, OpenCheckpoint, PartWriter, TensorInfo
from plasmid.errors import ModelError
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import check_in_folder
from plasmid_models.quantized.formats import is_quantized
from pydantic import Field

from .companions import change_config, copy_files, read_config
from .parts import JOB, RECORDS, pack
from .safetensors_writer import INDEX, write_index, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor


class HF(Converter):
    """Hugging Face folder with safetensors, in one file or in shards with an index."""

    preloaded: ClassVar = (f"{__package__}.safetensors_files",)
    kind: Literal["hf"] = "hf"
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Dtype that floating-point weights are cast to when read; ``keep`` does not cast. Quantized weights (fp8 with
    scales per block, mxfp4) are dequantized, with ``keep`` to the dtype of the model's config."""
    max_shard_gb: float = Field(5.0, gt=0)
    """Maximum size of a weight file, in units of 10^9 bytes; a larger tensor gets its own file."""

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and (path / "config.json").is_file() and bool(_weight_files(path))

    def open_tensors(self, path: Path) -> OpenCheckpoint:
        import torch

        from .safetensors_files import OpenFolder, OpenQuantized

        dtype = None if self.dtype == "keep" else getattr(torch, self.dtype)
        plan = self._plan(path)
        if _has_quantized(path):
            return OpenQuantized(path, dtype)
        return OpenFolder([file for file, _ in plan], dtype)

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        opened = self.open_tensors(path)
        yield from opened.read({info.name for info in opened.tensors})

    def open_parts(self, path: Path) -> PartWriter:
        return _PartWriter(path, round(self.max_shard_gb * 1e9))

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        if not write_safetensors(path, tensors, max_shard_bytes=round(self.max_shard_gb * 1e9)):
            raise ModelError("the source has no tensors")

    def write_companions(self, source: Path, target: Path) -> None:
        if self.dtype != "keep":
            read_config(source / "config.json")  # so that errors name this file and not its copy
        copy_files(source, target)
        if self.dtype != "keep":
            change_config(target, dtype=self.dtype)

    def _plan(self, path: Path) -> list[tuple[Path, list[str]]]:
        """Return the weight files and the tensor names in each, checked against the index if there is one."""
        from safetensors import SafetensorError, safe_open

        if not path.is_dir():
            raise ModelError(f"{path}: no such folder")
        if (path / RECORDS / JOB).is_file():
            raise ModelError(f"{path}: is an unfinished conversion; repeat the `rl convert` command that began it")
        files = _weight_files(path)
        if not files:
            raise ModelError(f"{path}: has no weights (*.safetensors)")
        plan: list[tuple[Path, list[str]]] = []
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: is missing, but listed in {INDEX}")
            try:
                with safe_open(file, framework="pt") as weights:
                    plan.append((file, list(weights.keys())))
            except SafetensorError as error:
                raise ModelError(f"{file}: is not a complete safetensors file: {error}") from None
        _check_index(path, plan)
        return plan


def _has_quantized(path: Path) -> bool:
    """Return True if weights are in a quantized format that is dequantized when read; others are copied as they are."""
    config = path / "config.json"
    return config.is_file() and is_quantized(read_config(config))


class _PartWriter:
    """Writes one weight file per part. Implements `plasmid.components.PartWriter`."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def plan(self, tensors: Sequence[TensorInfo]) -> Sequence[Sequence[TensorInfo]]:
        return pack([[info] for info in tensors], self._max_bytes)

    def write(
        self, number: int, count: int, part: Sequence[TensorInfo], tensors: Iterable[tuple[str, Tensor]]
    ) -> Mapping[str, Any]:
        from .safetensors_files import write_file

        name = "model.safetensors" if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"
        write_file(self._folder / name, part, tensors)
        return {"files": [name], "names": [i.name for i in part], "bytes": sum(i.num_bytes for i in part)}

    def join(self, parts: Sequence[Mapping[str, Any]]) -> None:
        if len(parts) > 1:
            weight_map = {name: part["files"][0] for part in parts for name in part["names"]}
            write_index(self._folder, weight_map, sum(part["bytes"] for part in parts))


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX
    if index.is_file():
        return sorted({path / check_in_folder(index, name) for name in _weight_map(index).values()})
    return sorted(path.glob("*.safetensors"))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return {str(name): str(file) for name, file in read_json(index)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index}: is not an index of weights; weight_map must map each tensor to a file") from None


def _check_index(path: Path, plan: list[tuple[Path, list[str]]]) -> None:
    index = path / INDEX
    if not index.is_file():
        return
    found = {name: file.name for file, names in plan for name in names}
    for name, file in _weight_map(index).items():
        if found.get(name) != file:
            raise ModelError(f"{path / file}: has no tensor {name}, which is listed in {INDEX}")
