"""The text model of a folder, which may have further weights: a vision model, and multi-token prediction (MTP) layers.

Only the text model is trained and served. Its tensors have the same names as in a folder of the text model alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from .linear_attention import has_linear_attention
from .quantized.formats import KEY

Config = Mapping[str, Any]

WITH_VISION = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Model type of the text model, by the model type of folders that also have a vision model."""
OF_FOLDER = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", KEY)
"""Keys of a ``config.json`` that apply to the text model, too."""
DEFAULTS: Mapping[str, Config] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    }
}
"""Values of transformers for keys that published folders omit, by model type of the text model."""
PREFIXES = ("language_model.model.", "model.language_model.")
"""Prefixes of the text model's weights in folders that also have a vision model, instead of `BACKBONE`."""
BACKBONE, HEAD, VALUE_HEAD = "model.", "lm_head.", "score."
IN_TRANSFORMERS = "model.language_model."
"""Prefix instead of `BACKBONE` of the modules of transformers' models of text and images."""


def has_vision(config: Config) -> bool:
    """Return True if the folder with this ``config.json`` also has a vision model."""
    return config.get("model_type") in WITH_VISION


def text_config(config: Config) -> dict[str, Any]:
    """Return the configuration of the text model in a ``config.json``, which may be the whole file."""
    inner = config.get("text_config")
    inner = inner if isinstance(inner, Mapping) else {}
    if not has_vision(config):
        return dict(inner or config)
    family = WITH_VISION[config["model_type"]]
    shared = {key: config[key] for key in OF_FOLDER if key in config}
    return {**DEFAULTS.get(family, {}), **inner, **shared, "model_type": family}


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderNames:
    """Names of the text model's tensors in a folder."""

    prefix: str = BACKBONE
    """Prefix of its tensors except the head."""
    head: str = HEAD
    untrained: tuple[str, ...] = ()
    """Prefixes of tensors of its MTP layers, which are not trained."""

    @classmethod
    def of(cls, config: Config, names: Collection[str]) -> Self:
        """Return the names in a folder with this ``config.json`` and with tensors of these ``names``."""
        if not has_vision(config):
            return cls(untrained=prediction_layers(config))
        prefix = next((one for one in PREFIXES if any(name.startswith(one) for name in names)), PREFIXES[0])
        own_head = f"{PREFIXES[0].partition('.')[0]}.{HEAD}"
        head = own_head if any(name.startswith(own_head) for name in names) else HEAD
        return cls(prefix=prefix, head=head, untrained=prediction_layers(config))

    @property
    def has_vision(self) -> bool:
        """True if the folder also has a vision model."""
        return self.prefix != BACKBONE

    def in_folder(self, name: str) -> str:
        """Return the name in the folder of the text model's tensor ``name``."""
        if name.startswith(BACKBONE):
            return self.prefix + name.removeprefix(BACKBONE)
        return self.head + name.removeprefix(HEAD) if name.startswith(HEAD) else name

    def in_model(self, name: str) -> str | None:
        """Return the text model's name of the folder's tensor ``name``; None if it belongs to no text model."""
        if name.startswith(self.untrained):
            return None
        if not self.has_vision or name.startswith(VALUE_HEAD):
            return name
        if name.startswith(self.prefix):
            return BACKBONE + name.removeprefix(self.prefix)
        return HEAD + name.removeprefix(self.head) if name.startswith(self.head) else None

    def in_transformers(self, name: str) -> str:
        """Return transformers' name for the folder's model of the text model's module or tensor ``name``."""
        return IN_TRANSFORMERS + name.removeprefix(BACKBONE) if self.has_vision else name


def prediction_layers(config: Config) -> tuple[str, ...]:
    """Return the prefixes of the weights of multi-token prediction layers in a folder with this ``config.json``."""
    config = text_config(config)
    if has_linear_attention(config):  # the config does not contain their number
        return ("mtp.",)
    last, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(last, int) or not isinstance(more, int):
        return ()
    return tuple(f"model.layers.{last + number}." for number in range(min(more, last)))
