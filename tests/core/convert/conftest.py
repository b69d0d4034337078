"""Small GGUF files, written byte by byte from the specification, independent of the package that reads them."""

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

F32 = 0
WIDTH, HEADS, KV_HEADS, FFN = 32, 4, 2, 64
TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *sorted("abcdefghijklmnopqrstuvwxyz0123456789"),
    "\u0120",
    "\u010a",
    "\u0120\u0120",
    "\u010a\u010a",
]
MERGES = ["\u0120 \u0120", "\u010a \u010a"]
Stored = tuple[str, tuple[int, ...], int, bytes]


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(item: object) -> bytes:
    match item:
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<II", 4, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case list() if isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        case list():
            return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)
    raise AssertionError(item)


def write_gguf(path: Path, metadata: Mapping[str, object], tensors: Sequence[Stored]) -> Path:
    """Write a file. ``tensors`` have Hugging Face's order of dimensions; the file stores them reversed."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, shape, kind, raw in tensors:
        data += b"\0" * (-len(data) % 32)
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
        data += raw
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def metadata(architecture: str = "llama", pre: str = "smollm") -> dict[str, object]:
    a = architecture
    return {
        "general.architecture": a,
        f"{a}.block_count": 1,
        f"{a}.context_length": 128,
        f"{a}.embedding_length": WIDTH,
        f"{a}.feed_forward_length": FFN,
        f"{a}.attention.head_count": HEADS,
        f"{a}.attention.head_count_kv": KV_HEADS,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def shapes() -> dict[str, tuple[int, ...]]:
    kv = WIDTH // HEADS * KV_HEADS
    block = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (kv, WIDTH),
        "attn_v": (kv, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (FFN, WIDTH),
        "ffn_up": (FFN, WIDTH),
        "ffn_down": (WIDTH, FFN),
    }
    inside = {f"blk.0.{name}.weight": shape for name, shape in block.items()}
    return {"token_embd.weight": (len(TOKENS), WIDTH), **inside, "output_norm.weight": (WIDTH,)}


@pytest.fixture
def gguf_tensors() -> list[Stored]:
    """Return random weights of a one-layer model: name, shape, type, bytes."""
    draw = np.random.default_rng(0)
    return [(name, shape, F32, draw.standard_normal(shape).astype("<f4").tobytes()) for name, shape in shapes().items()]


@pytest.fixture
def make_gguf(tmp_path: Path, gguf_tensors: list[Stored]) -> Callable[..., Path]:
    """Return a function that writes a one-layer model as a GGUF file; keywords replace parts of it."""

    def make(
        name: str = "model.gguf",
        *,
        architecture: str = "llama",
        pre: str = "smollm",
        changes: Mapping[str, object] | None = None,
        without: Sequence[str] = (),
        tensors: Sequence[Stored] | None = None,
    ) -> Path:
        found = metadata(architecture, pre) | dict(changes or {})
        kept = {key: item for key, item in found.items() if key not in without}
        return write_gguf(tmp_path / name, kept, gguf_tensors if tensors is None else tensors)

    return make
