"""Tiny random models with a character-level tokenizer for tests: real Hugging Face folders, created in a second."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Literal

CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=.,:?!\n<>"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<system>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
Family = Literal[
    "deepseek_v3",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
]


def make_tiny_model(
    path: Path,
    *,
    family: Family = "llama",
    hidden_size: int = 64,
    num_layers: int = 2,
    seed: int = 0,
    tied: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    **overrides: Any,
) -> Path:
    """Write a random model (about 130,000 parameters) and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_tokenizer(path)
    settings: dict[str, Any] = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.08,
    }
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(family, **(settings | overrides)), dtype=getattr(torch, dtype)
        )
    model.save_pretrained(path)
    return path


def make_tiny_tokenizer(path: Path) -> Path:
    """Write a character-level tokenizer with a chat template into the folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "model_max_length": 256}
    (path / "tokenizer_config.json").write_text(json.dumps(names | settings))
    return path


def make_empty_model(path: Path) -> Path:
    """Write a model folder with a tokenizer and no weights, for runs with fake trainers and engines."""
    make_tiny_tokenizer(path)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path
