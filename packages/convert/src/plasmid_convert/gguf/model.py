"""Mapping of a GGUF file's tensors and settings to Hugging Face's layout.

transformers reads GGUF files, too, but dequantizes all tensors of a file in memory before returning one. Sources: the
GGUF specification (ggml/docs/gguf.md) and the weight layouts of llama.cpp's conversion script.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from plasmid.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Model class by GGUF architecture, which is also transformers' ``model_type``."""
INTERLEAVED = ("llama",)
"""Architectures whose query and key rows llama.cpp stores with the two rotary halves interleaved."""


@dataclass(frozen=True, slots=True)
class ModelMap:
    """Names, row orders and settings of one file."""

    path: Path
    architecture: str
    metadata: Mapping[str, object]

    @classmethod
    def of(cls, path: Path, metadata: Mapping[str, object]) -> Self:
        """Create the map from a file's metadata. Raises `ModelError` for an unknown architecture."""
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ModelError(f"{path}: architecture {architecture!r} is not supported; supported are {known}")
        return cls(path, architecture, metadata)

    def name(self, stored: str) -> str:
        """Return the Hugging Face name of a tensor. Raises `ModelError` if the architecture does not have it."""
        if stored in OUTSIDE:
            return OUTSIDE[stored]
        match stored.split("."):
            case ["blk", number, part, ("weight" | "bias") as ending] if part in BLOCK and number.isdecimal():
                return f"model.layers.{number}.{BLOCK[part]}.{ending}"
        raise ModelError(f"{self.path}: tensor {stored!r} does not belong to a {self.architecture} model")

    def arrange(self, name: str, values: Tensor) -> Tensor:
        """Reorder the rows of query and key projections: interleaved rotary halves become consecutive halves."""
        if self.architecture not in INTERLEAVED or ".self_attn." not in name:
            return values
        if ".q_proj." in name:
            heads = self._int("attention.head_count")
        elif ".k_proj." in name:
            heads = self._int("attention.head_count_kv", self._int("attention.head_count"))
        else:
            return values
        if values.shape[0] % (2 * heads):
            raise ModelError(f"{self.path}: {name}: {values.shape[0]} rows cannot be split into {heads} heads")
        rest = values.shape[1:]
        return values.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(values.shape)

    def config(self, *, tied: bool) -> dict[str, Any]:
        """Return the content of ``config.json`` without the weights' dtype."""
        heads, width = self._int("attention.head_count"), self._int("embedding_length")
        self._refuse_scaling()
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": width,
            "intermediate_size": self._int("feed_forward_length"),
            "num_hidden_layers": self._int("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._int("attention.head_count_kv", heads),
            "head_dim": self._int("attention.key_length", self._int("rope.dimension_count", width // heads)),
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "max_position_embeddings": self._int("context_length"),
            "rms_norm_eps": round(self._float("attention.layer_norm_rms_epsilon"), 12),
            "rope_theta": self._float("rope.freq_base", 10000.0),
            "tie_word_embeddings": tied,
            "vocab_size": self._int("vocab_size", len(self._tokens())),
            "use_cache": True,
        }
        if self.architecture != "qwen2":
            config["attention_bias"] = False
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            value = self.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
            if isinstance(value, int):
                config[f"{ours}_token_id"] = value
        return config

    def _tokens(self) -> list[str]:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise ModelError(f"{self.path}: tokenizer.ggml.tokens is missing from the header")
        return tokens

    def _refuse_scaling(self) -> None:
        scaling = self.metadata.get(f"{self.architecture}.rope.scaling.type", "none")
        if scaling != "none":
            raise ModelError(f"{self.path}: rope scaling {scaling!r} is not supported")

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int):
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be an integer, got {value!r}")
        if value < 1:
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be at least 1, got {value}")
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float):
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ModelError(f"{self.path}: {self.architecture}.{key} must be finite, got {value}")
        return float(value)

    def _get(self, key: str, default: object) -> object:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelError(f"{self.path}: {self.architecture}.{key} is missing from the header")
        return value
