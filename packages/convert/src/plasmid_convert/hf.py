"""Hugging Face folders: ``config.json``, safetensors, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.components import Converter
from plasmid.errors import ModelError
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import in_folder
from plasmid_models.folder import dtype_of, open_weights
from plasmid_models.fp8_blocks import BlockSlice, is_in_blocks, is_scale
from pydantic import Field

from .companions import change_config, copy_files, read_config
from .safetensors_writer import INDEX, write_safetensors

if TYPE_CHECKING:
    from torch import Tensor


class HF(Converter):
    """Hugging Face folder with safetensors, in one file or in shards with an index."""

    kind: Literal["hf"] = "hf"
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Dtype that floating-point weights are cast to when read; ``keep`` does not cast. Matrices in fp8 with scales per
    block become plain ones, with ``keep`` in the dtype of the model's config."""
    max_shard_gb: float = Field(5.0, gt=0)
    """Maximum size of a weight file, in units of 10^9 bytes; a larger tensor gets its own file."""

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and (path / "config.json").is_file() and bool(_weight_files(path))

    def num_tensors(self, path: Path) -> int | None:
        plan = self._plan(path)
        if not _has_blocks(path):
            return sum(len(names) for _, names in plan)
        names = dict.fromkeys(name for _, names in plan for name in names)
        return sum(not is_scale(name, names) for name in names)

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        import torch
        from safetensors import SafetensorError, safe_open

        dtype = None if self.dtype == "keep" else getattr(torch, self.dtype)
        plan = self._plan(path)
        if _has_blocks(path):
            yield from self._read_blocks(path)
            return
        for file, names in plan:
            try:
                with safe_open(file, framework="pt") as weights:
                    for name in names:
                        tensor = weights.get_tensor(name)
                        yield name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
            except SafetensorError as error:
                raise ModelError(f"{file}: is not a complete safetensors file: {error}") from None

    def _read_blocks(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        import torch

        keeps = self.dtype == "keep"
        plain = getattr(torch, dtype_of("model", path) if keeps else self.dtype)
        with open_weights("model", path) as found:
            for name, part in found.items():
                tensor = part[...]
                cast = isinstance(part, BlockSlice) or (not keeps and tensor.is_floating_point())
                yield name, tensor.to(plain) if cast else tensor

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


def _has_blocks(path: Path) -> bool:
    """Return True if matrices are in fp8 with scales per block; other folders are copied as they are."""
    config = path / "config.json"
    return config.is_file() and is_in_blocks(read_config(config))


def _weight_files(path: Path) -> list[Path]:
    index = path / INDEX
    if index.is_file():
        return sorted({path / in_folder(index, name) for name in _weight_map(index).values()})
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
