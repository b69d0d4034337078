"""Layers with linear attention (gated delta nets of Qwen3-Next and Qwen3.5), from ``config.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

Config = Mapping[str, Any]

LINEAR = "linear_attention"
"""Kind of these layers in ``layer_types`` of a config."""
LINEAR_FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types that have them."""
CHUNK = 64
"""Tokens of a chunk, in which transformers computes the delta rule with matrix products."""
INTERVAL = 4
"""Default of ``full_attention_interval``: every fourth layer has softmax attention."""


def linear_layers(config: Config) -> list[bool]:
    """Return which layers have linear attention."""
    config, layers = config.get("text_config") or config, 0
    if kinds := config.get("layer_types"):
        return [kind == LINEAR for kind in kinds]
    if isinstance(count := config.get("num_hidden_layers"), int):
        layers = count
    interval = config.get("full_attention_interval") or INTERVAL
    is_linear = config.get("model_type") in LINEAR_FAMILIES
    return [is_linear and (layer + 1) % interval != 0 for layer in range(layers)]


def has_linear_attention(config: Config) -> bool:
    """Return True if some layers have linear attention, whose state and convolution mix the tokens of a row."""
    return any(linear_layers(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """Sizes of a gated delta net (Yang et al. 2024)."""

    heads: int
    """Number of value heads; each has a state, a decay and a step size."""
    key_size: int
    value_size: int
    """Sizes of a key head and of a value head."""
    keys: int
    """Elements of a token's keys, and of its queries."""
    kernel: int
    """Number of tokens that the convolution covers."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Read the sizes. Raises KeyError if the config lacks one."""
        size = config["linear_key_head_dim"]
        return cls(
            heads=config["linear_num_value_heads"],
            key_size=size,
            value_size=config["linear_value_head_dim"],
            keys=config["linear_num_key_heads"] * size,
            kernel=config["linear_conv_kernel_dim"],
        )

    @property
    def values(self) -> int:
        """Elements of a token's values, of its output, and of the gate of its output."""
        return self.heads * self.value_size

    @property
    def convolved(self) -> int:
        """Elements of a token's queries, keys and values, which the convolution mixes with preceding tokens'."""
        return 2 * self.keys + self.values

    @property
    def projected(self) -> int:
        """Elements that a token is projected to: `convolved`, the gate of the output, decays and step sizes."""
        return self.convolved + self.values + 2 * self.heads

    @property
    def state(self) -> int:
        """Elements of a sequence's state, which does not grow with the sequence; it is kept in fp32."""
        return self.heads * self.key_size * self.value_size

    def request_bytes(self, dtype_bytes: int, *, columns: int) -> int:
        """Return the bytes that an engine keeps per request: the state, and ``columns`` inputs of the convolution."""
        return 4 * self.state + columns * self.convolved * dtype_bytes

    @property
    def flops(self) -> int:
        """FLOPs of a token's forward pass without projections: convolution, and the delta rule in chunks.

        Per head and token, C tokens of a chunk with keys of size k and values of size v: products of keys with keys and
        of queries with keys (2 C k), the solution of a triangular system for new values and decayed keys
        (C (k + v) / 2), the values of the chunk (C v), reads of the state by queries and keys, and its update (3 k v).
        """
        k, v = self.key_size, self.value_size
        products = 2 * CHUNK * k + CHUNK * (k + v) // 2 + CHUNK * v + 3 * k * v
        return 2 * (self.heads * products + self.kernel * self.convolved)
