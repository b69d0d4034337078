"""GGUF files (llama.cpp), read only.

The `gguf` package reads the container and dequantizes tensors; the modules `model` and `tokenizer` map tensors and
settings to Hugging Face's layout.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.components import Converter
from plasmid.errors import ModelError

from .model import ModelMap
from .tokenizer import write_tokenizer

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader
    from torch import Tensor


SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Size in bytes of a value, by its type."""
STRING, ARRAY = 8, 9
MAX_ITEMS = 4_000_000
"""Maximum number of items in all arrays of a file (tokens, merges, scores); the package creates an object for each."""
MAX_DIMENSIONS = 4


def check_header(path: Path) -> None:
    """Raise `ValueError` if the header claims more than the file holds, `OSError` if the file cannot be read.

    The `gguf` package allocates as much memory as a header claims. Source: the GGUF specification (ggml/docs/gguf.md).
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data).check()


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at, self._items = data, 4, 0
        self._order = "<"

    def check(self) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if self._number("I") & 0xFFFF == 0:  # the version of a big-endian file
            self._order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        for _ in range(fields):
            self._skip_string()
            self._skip_value(self._number("I"))
        for _ in range(tensors):
            self._skip_string()
            dimensions = self._number("I")
            if dimensions > MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            elements = 1
            for _ in range(dimensions):
                elements *= self._number("Q")
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self._number("I"))]
            end = self._number("Q") + elements // block * size
            if end > len(self._data):
                raise ValueError(f"a tensor ends at byte {end} of {len(self._data)}")

    def _number(self, kind: str) -> int:
        size = struct.calcsize(kind)
        self._skip(size)
        number: int = struct.unpack_from(self._order + kind, self._data, self._at - size)[0]
        return number

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise ValueError(f"{size} bytes at byte {self._at} exceed the file's {len(self._data)} bytes")
        self._at += size

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _skip_value(self, kind: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            self._skip_array(self._number("I"), self._number("Q"))
        elif kind in SCALARS:
            self._skip(SCALARS[kind])
        else:
            raise ValueError(f"a value has the unknown type {kind}")

    def _skip_array(self, kind: int, count: int) -> None:
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"arrays have {self._items} items, more than {MAX_ITEMS}")
        if kind == STRING:
            for _ in range(count):
                self._skip_string()
        elif kind in SCALARS:
            self._skip(SCALARS[kind] * count)
        else:
            raise ValueError(f"an array has items of type {kind}")  # the package misreads nested arrays as one array


MAGIC = b"GGUF"


class GGUF(Converter):
    """GGUF file of llama.cpp with weights, settings and tokenizer of a Llama, Qwen2 or Qwen3 model. Read only."""

    kind: Literal["gguf"] = "gguf"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the converted weights, regardless of their quantization in the file."""

    def recognises(self, path: Path) -> bool:
        return path.is_file() and _head(path, 4) == MAGIC

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        import torch
        from gguf.quants import dequantize

        reader = _open(path)
        model = ModelMap.of(path, _metadata(path, reader))
        for stored in reader.tensors:
            name = model.name(stored.name)
            with _raise_model_errors(path, f"tensor {stored.name} ({stored.tensor_type.name})"):
                values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
            shape = tuple(int(n) for n in reversed(stored.shape.tolist()))
            yield name, model.arrange(name, values.reshape(shape)).to(getattr(torch, self.dtype))

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise ModelError("layout gguf is read-only; convert to hf, then use llama.cpp's tools")

    def write_companions(self, source: Path, target: Path) -> None:
        reader = _open(source)
        metadata = _metadata(source, reader)
        model = ModelMap.of(source, metadata)
        tied = not any(stored.name == "output.weight" for stored in reader.tensors)
        config = model.config(tied=tied) | {"dtype": self.dtype}
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        (target / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n", encoding="utf-8")
        write_tokenizer(source, metadata, target)


def _head(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ModelError(f"{path}: cannot read: {(error.strerror or str(error)).lower()}") from None


def _open(path: Path) -> GGUFReader:
    from gguf.gguf_reader import GGUFReader

    if _head(path, 4) != MAGIC:
        raise ModelError(f"{path}: is not a GGUF file; it begins with {_head(path, 4)!r}, not {MAGIC!r}")
    with _raise_model_errors(path, "the header"):
        check_header(path)
        return GGUFReader(path)


def _metadata(path: Path, reader: GGUFReader) -> dict[str, object]:
    with _raise_model_errors(path, "the header"):
        return {name: field.contents() for name, field in reader.fields.items()}


@contextmanager
def _raise_model_errors(path: Path, what: str) -> Iterator[None]:
    """Convert errors to `ModelError`: the `gguf` package trusts its input, so a damaged file may raise anything."""
    try:
        yield
    except (
        ValueError,
        IndexError,
        KeyError,
        OverflowError,
        TypeError,
        MemoryError,
        NotImplementedError,
        OSError,
        RuntimeError,
        struct.error,
    ) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = re.sub(r"np\.\w+\((\w+)\)", r"\1", reason)
        raise ModelError(
            f"{path}: cannot read {what}: {reason}; the file is truncated, corrupt or newer than the gguf package"
        ) from error
