"""Write a Hugging Face folder atomically from a stream of whole tensors, with the untrained weights of its source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from plasmid.errors import CheckpointError, ModelError
from plasmid.utils.safe_files import apply_umask, copy_file
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .folder import INDEX, SINGLE, copy_companions, dtype_of, folder_names, is_torch_dist, open_folder, read_config
from .quantized.formats import remove_quantization
from .quantized.slices import QuantizedSlice
from .text_model import FolderNames, has_vision, prediction_layers

FILE_BYTES = 4 << 30
ChangeConfig = Callable[[dict[str, Any]], dict[str, Any]]
"""Function from the source's ``config.json`` to the exported one."""


class FolderWriter:
    """Writes a Hugging Face folder under a temporary name and renames it once it is complete."""

    def __init__(
        self, target: Path, *, source: Path, tokenizer: Path, change_config: ChangeConfig | None = None
    ) -> None:
        """Take the config from the model folder ``source`` and the tokenizer files from ``tokenizer``."""
        self._target = target
        self._temporary = target.with_name(f".{target.name}.tmp")
        self._source = source
        self._tokenizer = tokenizer
        self._change_config = change_config

    def write(self, tensors: Iterator[tuple[str, Tensor]], *, sizes: Mapping[str, int]) -> None:
        """Write the text model's tensors, in the order of their ``sizes`` in bytes, then the source's other tensors.

        Raises `CheckpointError`.
        """
        try:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
            copy_companions(self._source, self._temporary)
            if self._tokenizer != self._source:
                copy_companions(self._tokenizer, self._temporary)
                copy_file(self._source / "config.json", self._source, self._temporary / "config.json")
            config = json.loads((self._source / "config.json").read_text(encoding="utf-8"))
            changed = remove_quantization(config if self._change_config is None else self._change_config(config))
            if changed != config:
                (self._temporary / "config.json").write_text(json.dumps(changed, indent=2), encoding="utf-8")
            self._write_weights(*self._with_untrained(tensors, sizes))
            shutil.rmtree(self._target, ignore_errors=True)
            self._temporary.replace(self._target)
        except ModelError:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise CheckpointError(f"{self._target}: the model cannot be written: {error}") from None

    def _with_untrained(
        self, tensors: Iterator[tuple[str, Tensor]], sizes: Mapping[str, int]
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, int]]:
        """Return tensors and sizes by the names of the source, followed by the untrained tensors."""
        names, rest = folder_names("model", self._source), UntrainedWeights(self._source, where="model")
        own = ((names.in_folder(name), tensor) for name, tensor in tensors)
        own_sizes = {names.in_folder(name): size for name, size in sizes.items()}
        return chain(own, rest), own_sizes | {name: tensor.nbytes for name, tensor in rest}

    def _write_weights(self, tensors: Iterator[tuple[str, Tensor]], sizes: Mapping[str, int]) -> None:
        groups = _groups(sizes)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(groups, 1):
            file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            part: dict[str, Tensor] = {}
            for name in names:
                came, tensor = next(tensors)
                assert came == name, f"tensors must come in the order of their sizes: {came} is not {name}"
                part[name] = tensor.cpu().clone()
            save_file(part, self._temporary / file, metadata={"format": "pt"})
            apply_umask(self._temporary / file)
            weight_map |= dict.fromkeys(names, file)
        if len(groups) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            (self._temporary / INDEX).write_text(json.dumps(index, indent=2))


def _groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Return the tensor names of each file, in order; a file has up to `FILE_BYTES`, or one larger tensor."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` of an exported critic: that of the language model, as a token classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

    name = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(config.get("model_type", ""))
    return config | {"architectures": [name] if name else [], "id2label": {"0": "value"}, "label2id": {"value": 0}}


class UntrainedWeights:
    """Weights of a model folder that are not trained, and copied to exported folders unchanged.

    These are vision models, and multi-token prediction layers, which engines use for speculative decoding.
    """

    def __init__(self, path: Path, *, where: str) -> None:
        """Raises `ModelError` if the folder no longer has weights."""
        self._where, self._path, self._names = where, path, list[str]()
        config = read_config(where, path)
        if (has_vision(config) or prediction_layers(config)) and not is_torch_dist(path):
            with open_folder(where, path) as found:
                of_model = FolderNames.of(config, found)
                self._names = [name for name in found if of_model.in_model(name) is None]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, read lazily; quantized ones are cast to the dtype of the folder's config."""
        if not self._names:
            return
        dtype = getattr(torch, dtype_of(self._where, self._path))
        with open_folder(self._where, self._path) as found:
            for name in self._names:
                tensor: Tensor = found[name][...]
                yield name, tensor.to(dtype) if isinstance(found[name], QuantizedSlice) else tensor
