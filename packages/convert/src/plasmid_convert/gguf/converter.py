"""GGUF files (llama.cpp), read only. The `gguf` package reads the container and undoes the quantisation; what the
tensors and settings are called in Hugging Face's layout stands in `gguf_model` and `gguf_tokenizer`."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from plasmid.components import Converter
from plasmid.errors import ModelError

from .header import check_header
from .model import ModelMap
from .tokenizer import write_tokenizer

if TYPE_CHECKING:
    from gguf.gguf_reader import GGUFReader
    from torch import Tensor

MAGIC = b"GGUF"


class GGUF(Converter):
    """One file of llama.cpp with weights, settings and tokenizer: Llama, Qwen2 and Qwen3 models. Can be read only."""

    kind: Literal["gguf"] = "gguf"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What weights become, whatever they were quantised to."""

    def recognises(self, path: Path) -> bool:
        return path.is_file() and _head(path, 4) == MAGIC

    def num_tensors(self, path: Path) -> int | None:
        head = _head(path, 16)
        return int(struct.unpack_from("<Q", head, 8)[0]) if head[:4] == MAGIC and len(head) == 16 else None

    def read(self, path: Path) -> Iterator[tuple[str, Tensor]]:
        import torch
        from gguf.quants import dequantize

        reader = _open(path)
        model = ModelMap.of(path, _metadata(path, reader))
        for stored in reader.tensors:
            name = model.name(stored.name)
            with _bad_file(path, f"tensor {stored.name} ({stored.tensor_type.name})"):
                values = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
            shape = tuple(int(n) for n in reversed(stored.shape.tolist()))
            yield name, model.arrange(name, values.reshape(shape)).to(getattr(torch, self.dtype))

    def write(self, path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
        raise ModelError("layout gguf can only be read; convert to hf and use llama.cpp's own tools from there")

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
        raise ModelError(f"{path}: is no GGUF file; it begins with {_head(path, 4)!r}, not {MAGIC!r}")
    with _bad_file(path, "the header"):
        check_header(path)
        return GGUFReader(path)


def _metadata(path: Path, reader: GGUFReader) -> dict[str, object]:
    with _bad_file(path, "the header"):
        return {name: field.contents() for name, field in reader.fields.items()}


@contextmanager
def _bad_file(path: Path, what: str) -> Iterator[None]:
    """Boundary: the package trusts its input, so a damaged file ends in all kinds of errors."""
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
            f"{path}: {what} cannot be read: {reason}; the file is cut off, damaged or newer than the gguf package"
        ) from error
