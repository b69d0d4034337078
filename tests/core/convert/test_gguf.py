"""GGUF files: dequantization against literal code, names, rope order, tokenizer, and errors for invalid files."""

import json
import math
import random
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from plasmid.errors import ModelError
from plasmid_convert import GGUF, HF, convert

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache"


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def q4_0(block: bytes) -> list[float]:
    """18 bytes: scale, then 16 bytes; low nibbles are the first half, high nibbles the second; offset 8."""
    scale = half(block[:2])
    return [((b & 15) - 8) * scale for b in block[2:]] + [((b >> 4) - 8) * scale for b in block[2:]]


def q4_1(block: bytes) -> list[float]:
    """20 bytes: scale, minimum, nibbles as above without the offset."""
    scale, least = half(block[:2]), half(block[2:4])
    return [(b & 15) * scale + least for b in block[4:]] + [(b >> 4) * scale + least for b in block[4:]]


def q8_0(block: bytes) -> list[float]:
    """34 bytes: scale, then 32 signed bytes."""
    scale = half(block[:2])
    return [v * scale for v in struct.unpack("<32b", block[2:])]


def bf16(pair: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + pair)[0]]


def f16(pair: bytes) -> list[float]:
    return [half(pair)]


def f32(four: bytes) -> list[float]:
    return [struct.unpack("<f", four)[0]]


def random_blocks(num_blocks: int, *, scales: int, payload: int) -> bytes:
    draw = random.Random(1)
    blocks = (
        b"".join(struct.pack("<e", draw.uniform(-2, 2)) for _ in range(scales)) + draw.randbytes(payload)
        for _ in range(num_blocks)
    )
    return b"".join(blocks)


@pytest.mark.parametrize(
    ("kind", "literal", "block_size", "per_block", "scales"),
    [
        (2, q4_0, 18, 32, 1),
        (3, q4_1, 20, 32, 2),
        (8, q8_0, 34, 32, 1),
        (1, f16, 2, 1, 1),
        (30, bf16, 2, 1, 1),
        (0, f32, 4, 1, 2),
    ],
    ids=["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"],
)
def test_dequantisation_equals_literal_code(make_gguf, kind, literal, block_size, per_block, scales):
    rows, columns = 8, 64
    num_blocks = rows * columns // per_block
    raw = random_blocks(num_blocks, scales=scales, payload=block_size - 2 * scales)
    expected = [v for i in range(num_blocks) for v in literal(raw[i * block_size : (i + 1) * block_size])]
    path = make_gguf(tensors=[("blk.0.ffn_down.weight", (rows, columns), kind, raw)])
    [(name, tensor)] = GGUF(dtype="float32").read(path)
    assert name == "model.layers.0.mlp.down_proj.weight"
    assert tensor.shape == (rows, columns)
    assert tensor.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_query_and_key_rows_get_their_rotary_halves_back(make_gguf):
    """llama.cpp stores row ``2 i + half`` of each head where Hugging Face has row ``half * head_dim / 2 + i``."""
    heads, head_dim, width = 4, 8, 32
    rows = np.arange(heads * head_dim, dtype="<f4")
    stored = np.empty((heads * head_dim, width), dtype="<f4")
    for head in range(heads):
        for pair in range(head_dim // 2):
            for side in range(2):
                stored[head * head_dim + 2 * pair + side] = rows[head * head_dim + side * head_dim // 2 + pair]
    tensors = [(f"blk.0.attn_{part}.weight", stored.shape, 0, stored.tobytes()) for part in ("q", "v")]
    read = dict(GGUF(dtype="float32").read(make_gguf(tensors=tensors)))
    assert read["model.layers.0.self_attn.q_proj.weight"][:, 0].tolist() == rows.tolist()
    assert torch.equal(read["model.layers.0.self_attn.v_proj.weight"], torch.from_numpy(stored))
    others = dict(GGUF(dtype="float32").read(make_gguf(architecture="qwen2", tensors=tensors)))
    assert torch.equal(others["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(stored))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_result_loads_and_computes(make_gguf, gguf_tensors, tmp_path, architecture):
    from transformers import AutoModelForCausalLM

    extra = {
        "llama": {},
        "qwen2": {f"blk.0.attn_{part}.bias": size for part, size in (("q", 32), ("k", 16), ("v", 16))},
        "qwen3": {f"blk.0.attn_{part}_norm.weight": 8 for part in "qk"},
    }[architecture]
    more = [(name, (size,), 0, np.ones(size, "<f4").tobytes()) for name, size in extra.items()]
    path = make_gguf(architecture=architecture, tensors=gguf_tensors + more)
    convert(path, tmp_path / "out", reader=GGUF(dtype="float32"), writer=HF())
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert math.isfinite(float(model(torch.tensor([[3, 4, 5]])).logits.detach().sum()))


def test_a_separate_output_matrix_is_not_tied(make_gguf, gguf_tensors, tmp_path):
    name, shape, kind, raw = gguf_tensors[0]
    assert name == "token_embd.weight"
    path = make_gguf(tensors=[*gguf_tensors, ("output.weight", shape, kind, raw)])
    convert(path, tmp_path / "out", reader=GGUF(), writer=HF())
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in dict(HF().read(tmp_path / "out"))


def test_digits_are_split_off_before_the_spaces_around_them(make_gguf, tmp_path):
    """Without the pre-tokenizer that the file only names, " 12" would lose its two-space token."""
    from transformers import AutoTokenizer

    convert(make_gguf(), tmp_path / "out", reader=GGUF(), writer=HF())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("  12") == ["\u0120\u0120", "1", "2"]
    assert tokenizer.tokenize("\n\n5") == ["\u010a\u010a", "5"]
    assert tokenizer.decode(tokenizer("a 1\n\n2")["input_ids"]) == "a 1\n\n2"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "</s>")
    assert tokenizer("x</s>")["input_ids"][-1] == 2
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"


def test_a_first_token_is_added_if_the_file_requires_it(make_gguf, tmp_path):
    from tokenizers import Tokenizer

    path = make_gguf(pre="llama-bpe", changes={"tokenizer.ggml.add_bos_token": True})
    convert(path, tmp_path / "out", reader=GGUF(), writer=HF())
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("ab").tokens == ["<s>", "a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"changes": {"general.architecture": "gemma3"}},
            "architecture 'gemma3' is not supported; supported are llama, qwen2, qwen3",
        ),
        (
            {"without": ["general.architecture"]},
            "architecture None is not supported; supported are llama, qwen2, qwen3",
        ),
        ({"without": ["llama.block_count"]}, "llama.block_count is missing from the header"),
        ({"changes": {"llama.embedding_length": "wide"}}, "llama.embedding_length must be an integer, got 'wide'"),
        (
            {"changes": {"llama.rope.scaling.type": "yarn"}},
            "rope scaling 'yarn' is not supported",
        ),
        ({"without": ["tokenizer.ggml.tokens"]}, "tokenizer.ggml.tokens is missing from the header"),
        (
            {"changes": {"tokenizer.ggml.model": "llama"}},
            "tokenizer 'llama' is not supported, only byte-level BPE ('gpt2')",
        ),
        (
            {"pre": "tekken"},
            "pre-tokenizer 'tekken' is not supported; supported are default, gpt-2, llama-bpe, qwen2, smollm",
        ),
        (
            {"changes": {"tokenizer.ggml.merges": ["alone"]}},
            "a merge of the tokenizer is not a pair of tokens: 'alone'",
        ),
        ({"changes": {"tokenizer.ggml.eos_token_id": 99}}, "eos token 99 is not among the 43 tokens"),
        (
            {"tensors": [("rope_freqs.weight", (4,), 0, bytes(16))]},
            "tensor 'rope_freqs.weight' does not belong to a llama model",
        ),
        (
            {"tensors": [("blk.0.attn_q.weight", (9, 32), 0, bytes(9 * 32 * 4))]},
            "model.layers.0.self_attn.q_proj.weight: 9 rows cannot be split into 4 heads",
        ),
    ],
)
def test_unsupported_files_give_a_one_line_error(make_gguf, tmp_path, options, message):
    path = make_gguf(**options)
    with pytest.raises(ModelError) as error:
        convert(path, tmp_path / "out", reader=GGUF(), writer=HF())
    assert str(error.value) == f"{path}: {message}"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("fraction", [0.0003, 0.001, 0.01, 0.05, 0.5, 0.999])
def test_a_cut_off_file_is_one_clear_line_and_leaves_nothing(make_gguf, tmp_path, fraction):
    path = make_gguf()
    data = path.read_bytes()
    path.write_bytes(data[: max(5, int(len(data) * fraction))])
    with pytest.raises(ModelError) as error:
        convert(path, tmp_path / "out", reader=GGUF(), writer=HF())
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_type_of_tensor_is_named(make_gguf, tmp_path):
    path = make_gguf(tensors=[("blk.0.ffn_up.weight", (1, 32), 77, bytes(64))])
    with pytest.raises(ModelError, match=r": 77 is not a valid GGMLQuantizationType"):
        list(GGUF().read(path))


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError) as error:
        list(GGUF().read(path))
    assert str(error.value) == rf"{path}: is not a GGUF file; it begins with b'PK\x03\x04', not b'GGUF'"
    assert not GGUF().recognises(path)


def test_gguf_cannot_be_written(make_gguf, tmp_path):
    with pytest.raises(ModelError, match=r"layout gguf is read-only; convert to hf"):
        convert(make_gguf(), tmp_path / "out", reader=GGUF(), writer=GGUF())
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_recognised_and_read_completely(make_gguf, gguf_tensors):
    path = make_gguf()
    assert GGUF().recognises(path)
    assert len(gguf_tensors) == len(list(GGUF().read(path)))


@pytest.mark.long
def test_the_real_model_answers_a_question(tmp_path):
    """SmolLM2-135M as written by `make model`, which also downloads the file if it is missing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (CACHE / GGUF_NAME).is_file():
        subprocess.run(["make", "gguf"], cwd=ROOT, check=True)
    convert(CACHE / GGUF_NAME, tmp_path / "model", reader=GGUF(), writer=HF())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
