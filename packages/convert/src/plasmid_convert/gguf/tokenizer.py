"""Conversion of a GGUF file's tokenizer and chat template to Hugging Face files.

GGUF stores the vocabulary and the merges, but only the name of the pre-tokenizer (``tokenizer.ggml.pre``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plasmid.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

CONTROL, USER_DEFINED = 3, 4
"""Token types of the GGUF specification; tokens of these types are matched before the text is split."""
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenizer pattern of Llama 3 and Qwen2, which differ in the maximum number of digits per piece."""


def write_tokenizer(source: Path, metadata: Mapping[str, object], target: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``. Raises `ModelError` for unknown kinds of tokenizers."""
    tokens = _list(source, metadata, "tokens")
    tokenizer = _tokenizer(source, metadata, tokens)
    tokenizer.save(str(target / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(number, int):
            if not 0 <= number < len(tokens):
                raise ModelError(f"{source}: {theirs} token {number} is not among the {len(tokens)} tokens")
            settings[f"{ours}_token"] = tokens[number]
    length = metadata.get(f"{metadata['general.architecture']}.context_length")
    if isinstance(length, int):
        settings["model_max_length"] = length
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        settings["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _tokenizer(source: Path, metadata: Mapping[str, object], tokens: list[Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelError(f"{source}: tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2')")
    merges = [tuple(str(pair).split(" ", 1)) for pair in _list(source, metadata, "merges")]
    odd = next((merge for merge in merges if len(merge) != 2), None)
    if odd is not None:
        raise ModelError(f"{source}: a merge of the tokenizer is not a pair of tokens: {odd[0][:50]!r}")
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(source, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    types = _list(source, metadata, "token_type")
    special = [(t, kind) for t, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(t, special=kind == CONTROL, normalized=False) for t, kind in special])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and isinstance(bos, int):
        _add_bos(tokenizer, tokens[bos], bos)
    return tokenizer


def _pre_tokenizer(source: Path, pre: object) -> PreTokenizer:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as parts

    match pre:
        case "smollm":
            # digits are split first: otherwise "\n\n5" and "  12" would be tokenized differently
            digits = parts.Digits(individual_digits=True)
            return parts.Sequence([digits, parts.ByteLevel(add_prefix_space=False, use_regex=True)])
        case "gpt-2" | "default":
            return parts.ByteLevel(add_prefix_space=False, use_regex=True)
        case "qwen2" | "llama-bpe" | "llama3" | "llama-v3":
            words = Regex(WORDS % ("" if pre == "qwen2" else "{1,3}"))
            bytes_ = parts.ByteLevel(add_prefix_space=False, use_regex=False)
            return parts.Sequence([parts.Split(words, "isolated"), bytes_])
    known = "default, gpt-2, llama-bpe, qwen2, smollm"
    raise ModelError(f"{source}: pre-tokenizer {pre!r} is not supported; supported are {known}")


def _add_bos(tokenizer: Tokenizer, token: str, number: int) -> None:
    from tokenizers import processors

    template = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, number)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


def _list(source: Path, metadata: Mapping[str, object], key: str) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list):
        raise ModelError(f"{source}: tokenizer.ggml.{key} is missing from the header")
    return value
