"""Shapes and sizes of a language model's weights, derived from ``config.json`` without building the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from plasmid.errors import ConfigError

from ..linear_attention import Config, DeltaNet, linear_layers
from ..text_model import text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences of a model family from Llama."""

    query_bias: bool | None = None
    """True if queries, keys and values have biases; None reads ``attention_bias``."""
    output_bias: bool = False
    """True if ``attention_bias`` also adds a bias to the output projection."""
    head_norm: Literal["none", "head", "all"] = "none"
    """Normalization of queries and keys: none, per head, or over all heads."""
    norms: int = 2
    """Number of normalizations per layer."""
    head_size: int | None = None
    """Head size if the config has none; None is hidden size / number of heads."""
    tied: bool = False
    """True if input and output embeddings are tied by default."""
    shared_gate: bool = False
    """True if the shared expert has a gate."""
    sinks: bool = False
    """True if each head of attention has a sink."""
    expert_bias: bool = False
    """True if routers and experts have biases."""
    output_gate: bool = False
    """True if queries are projected to twice their size, for a gate of attention's output."""


HYBRID = Family(output_bias=True, head_norm="head", head_size=256, output_gate=True)
"""Families in which most layers have linear attention."""
FAMILIES: Mapping[str, Family] = {
    "llama": Family(output_bias=True),
    "mistral": Family(query_bias=False),
    "mixtral": Family(query_bias=False),
    "smollm3": Family(output_bias=True, tied=True),
    "granite": Family(output_bias=True),
    "phi3": Family(query_bias=False),
    "qwen2": Family(query_bias=True),
    "qwen2_moe": Family(query_bias=True, shared_gate=True),
    "qwen3": Family(output_bias=True, head_norm="head", head_size=128),
    "qwen3_moe": Family(output_bias=True, head_norm="head"),
    "olmo2": Family(output_bias=True, head_norm="all"),
    "gemma2": Family(output_bias=True, norms=4, head_size=256, tied=True),
    "gemma3_text": Family(output_bias=True, norms=4, head_size=256, tied=True, head_norm="head"),
    "glm4": Family(norms=4, head_size=128),
    "glm4_moe": Family(head_size=128),
    "glm4_moe_lite": Family(),
    "deepseek_v3": Family(),
    "gpt_oss": Family(output_bias=True, sinks=True, expert_bias=True),
    "qwen3_next": replace(HYBRID, shared_gate=True),
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": replace(HYBRID, shared_gate=True),
}
"""Supported families; their parameter counts were compared with transformers."""
BEFORE_ACTIVATION = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a model, or the same weight of all experts of a layer."""

    name: str
    """Name in the model folder without ``.weight``; for experts without their index."""
    shape: tuple[int, ...]
    count: int = 1
    active: float = 1.0
    """Number out of ``count`` that each token is multiplied with; 0 for input embeddings, which are only looked up."""

    @property
    def size(self) -> int:
        """Number of elements."""
        total = self.count
        for length in self.shape:
            total *= length
        return total

    @property
    def is_expert(self) -> bool:
        return ".experts." in self.name

    @property
    def layer_name(self) -> str:
        """Name of the layer in the model folder, for experts of the first one; empty if it cannot have an adapter."""
        if len(self.shape) == 2 and self.is_expert:
            return self.name.replace(".experts.", ".experts.0.")
        return self.name if self.is_linear else ""

    @property
    def is_linear(self) -> bool:
        """True for a linear layer of the decoder, unlike experts and their router."""
        return len(self.shape) == 2 and ".layers." in self.name and not (self.is_expert or self.name.endswith(".gate"))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model's weights, KV cache and activations."""

    family: str
    weights: tuple[Weight, ...]
    layers: int
    hidden: int
    vocab: int
    heads: int
    query: int
    """Elements of a token's queries per layer with softmax attention."""
    value: int
    """Elements of a token's attention output per such layer, over all heads."""
    keys: int
    """Elements of a token's keys per such layer in training."""
    cache: int
    """Elements of a token in the KV cache per such layer."""
    linear: int
    """Number of layers with linear attention, which have no KV cache."""
    net: DeltaNet | None
    """Sizes of these layers; None if there are none."""
    has_output_gate: bool
    """True if attention's output has a gate, of the size of queries."""
    has_latent_cache: bool
    """True if all heads share one compressed key and value (latent attention)."""
    has_head_norm: bool
    inner: int
    """Mean over layers of the active feed-forward width per token, experts included."""
    experts: int
    """Number of experts per layer; 0 for dense models."""
    routed: int
    """Number of experts that each token is routed to, without shared experts."""
    tied: bool

    @classmethod
    def of(cls, config: Config, *, where: str = "model.path") -> ModelShape:
        """Derive the shape from a config. Raises `ConfigError` for unknown families and configs that lack sizes."""
        config = text_config(config)
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise ConfigError(
                f"{where}: `rl plan` does not support model_type {family!r}; supported are "
                f"{', '.join(sorted(FAMILIES))}"
            )
        try:
            return _shape(family, config)
        except KeyError as error:
            raise ConfigError(
                f"{where}: config.json has no {error.args[0]}, which model_type {family!r} needs"
            ) from None

    @cached_property
    def parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        return sum(weight.size for weight in self.weights)

    @cached_property
    def active(self) -> int:
        """Number of parameters in matrices that each token is multiplied with, output embeddings included."""
        one = (w.size / w.count * w.active for w in self.weights if len(w.shape) == 2)
        return round(sum(one)) + (self.embedding if self.tied else 0)

    @property
    def attending(self) -> int:
        """Number of layers with softmax attention."""
        return self.layers - self.linear

    @property
    def token_cache(self) -> int:
        """Elements of a token in the KV cache of all layers."""
        return self.attending * self.cache

    def request_bytes(self, dtype_bytes: int, *, columns: int | None = None) -> int:
        """Return the bytes of a request's states in all layers with linear attention, regardless of its length.

        ``columns`` is the number of inputs of the convolution that an engine keeps; by default as many as it needs.
        """
        if self.net is None:
            return 0
        return self.linear * self.net.request_bytes(dtype_bytes, columns=columns or self.net.kernel - 1)

    @property
    def embedding(self) -> int:
        """Number of parameters of the input embeddings, and of the output embeddings."""
        return self.vocab * self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of routed experts, which expert parallelism splits."""
        return sum(weight.size for weight in self.weights if weight.is_expert)

    @property
    def visited_experts(self) -> float:
        """Fraction of a layer's routed experts that each token is routed to."""
        return self.routed / self.experts if self.experts else 0.0

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of the largest layer."""
        sizes: dict[str, int] = {}
        for weight in self.weights:
            if match := re.search(r"\.layers\.\d+\.", weight.name):
                sizes[match[0]] = sizes.get(match[0], 0) + weight.size
        return max(sizes.values(), default=0)

    def adapter_parameters(self, rank: int, targets: Sequence[str] = (), *, experts: bool = False) -> int:
        """Return the number of parameters of an adapter of the layers that match ``targets``.

        By default all linear layers except experts. With ``experts``, only the adapters of routed experts count.
        """
        adapted = (weight for weight in self.select_adapted(targets) if weight.is_expert or not experts)
        return sum(rank * sum(weight.shape) * weight.count for weight in adapted)

    def select_adapted(self, targets: Sequence[str] = ()) -> list[Weight]:
        """Return the weights of the layers that match ``targets``; by default of all linear layers except experts."""
        if not targets:
            return [weight for weight in self.weights if weight.is_linear]
        named = [weight for weight in self.weights if weight.layer_name]
        return [weight for weight in named if any(re.search(target, weight.layer_name) for target in targets)]


def _shape(family: str, config: Config) -> ModelShape:
    kind, hidden, heads, layers = (
        FAMILIES[family],
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_hidden_layers"],
    )
    tied = bool(config.get("tie_word_embeddings", kind.tied))
    weights = [Weight("model.embed_tokens", (config["vocab_size"], hidden), active=0.0)]
    linear = linear_layers(config)
    for layer, is_linear in zip(range(layers), linear, strict=False):
        weights += _layer(kind, config, layer, is_linear=is_linear)
    weights.append(Weight("model.norm", (hidden,)))
    if not tied:
        weights.append(Weight("lm_head", (config["vocab_size"], hidden)))
    inner = sum(
        weight.shape[0] * weight.active
        for weight in weights
        if weight.name.endswith(".up_proj") and ".mlp" in weight.name
    )
    latent = config.get("kv_lora_rank")
    size = _head_size(kind, config)
    key_heads = config.get("num_key_value_heads") or heads
    query = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] if latent else size)
    return ModelShape(
        family=family,
        weights=tuple(weights),
        layers=layers,
        hidden=hidden,
        vocab=config["vocab_size"],
        heads=heads,
        query=query,
        value=heads * (config["v_head_dim"] if latent else size),
        keys=query if latent else key_heads * size,
        cache=latent + config["qk_rope_head_dim"] if latent else 2 * key_heads * size,
        linear=sum(linear[:layers]),
        net=DeltaNet.of(config) if any(linear) else None,
        has_output_gate=kind.output_gate,
        has_latent_cache=bool(latent),
        has_head_norm=_has_head_norm(kind, config),
        inner=round(inner / layers),
        experts=num_experts(config),
        routed=_num_routed(config),
        tied=tied,
    )


def _layer(kind: Family, config: Config, layer: int, *, is_linear: bool) -> Iterator[Weight]:
    at, hidden = f"model.layers.{layer}", config["hidden_size"]
    latent = config.get("kv_lora_rank")
    if is_linear:
        yield from _delta_net(config, f"{at}.linear_attn")
    else:
        yield from (_latent_attention if latent else _attention)(kind, config, f"{at}.self_attn")
    for number in range(kind.norms):
        yield Weight(f"{at}.norm_{number}", (hidden,))
    experts = num_experts(config)
    if not experts or not _is_sparse(config, layer):
        yield from _list_gated(f"{at}.mlp", hidden, config["intermediate_size"], bias=bool(config.get("mlp_bias")))
        return
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield Weight(f"{at}.mlp.gate", (experts, hidden))
    for weight in _list_gated(f"{at}.mlp.experts", hidden, inner, bias=kind.expert_bias):
        yield Weight(weight.name, weight.shape, experts, _num_routed(config))
    if kind.expert_bias:
        yield Weight(f"{at}.mlp.gate.bias", (experts,))
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * inner
    if shared:
        yield from _list_gated(f"{at}.mlp.shared_experts", hidden, shared)
    if kind.shared_gate:
        yield Weight(f"{at}.mlp.shared_expert_gate", (1, hidden))


def _attention(kind: Family, config: Config, at: str) -> Iterator[Weight]:
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], _head_size(kind, config)
    key_heads = config.get("num_key_value_heads") or heads
    bias = bool(config.get("attention_bias")) if kind.query_bias is None else kind.query_bias
    queries = 2 * heads if kind.output_gate else heads
    for name, count in (("q_proj", queries), ("k_proj", key_heads), ("v_proj", key_heads)):
        yield Weight(f"{at}.{name}", (count * size, hidden))
        if bias:
            yield Weight(f"{at}.{name}.bias", (count * size,))
    yield Weight(f"{at}.o_proj", (hidden, heads * size))
    if bias and kind.output_bias:
        yield Weight(f"{at}.o_proj.bias", (hidden,))
    if kind.sinks:
        yield Weight(f"{at}.sinks", (heads,))
    if _has_head_norm(kind, config):
        every = kind.head_norm == "all"
        yield Weight(f"{at}.q_norm", (heads * size if every else size,))
        yield Weight(f"{at}.k_norm", (key_heads * size if every else size,))


def _delta_net(config: Config, at: str) -> Iterator[Weight]:
    net, hidden = DeltaNet.of(config), config["hidden_size"]
    if config["model_type"] == "qwen3_next":
        projections = {"qkvz": net.convolved + net.values, "ba": 2 * net.heads}
    else:
        projections = {"qkv": net.convolved, "z": net.values, "b": net.heads, "a": net.heads}
    for name, size in projections.items():
        yield Weight(f"{at}.in_proj_{name}", (size, hidden))
    yield Weight(f"{at}.conv1d", (net.convolved, 1, net.kernel))
    yield Weight(f"{at}.dt_bias", (net.heads,))
    yield Weight(f"{at}.A_log", (net.heads,))
    yield Weight(f"{at}.norm", (net.value_size,))
    yield Weight(f"{at}.out_proj", (hidden, net.values))


def _latent_attention(kind: Family, config: Config, at: str) -> Iterator[Weight]:
    """Yield the weights of multi-head latent attention (DeepSeek-V2, 2024)."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    low, query = config.get("q_lora_rank"), heads * (plain + rope)
    bias = bool(config.get("attention_bias"))
    if low:
        yield Weight(f"{at}.q_a_proj", (low, hidden))
        yield Weight(f"{at}.q_a_layernorm", (low,))
        yield Weight(f"{at}.q_b_proj", (query, low))
    else:
        yield Weight(f"{at}.q_proj", (query, hidden))
    yield Weight(f"{at}.kv_a_proj_with_mqa", (latent + rope, hidden))
    yield Weight(f"{at}.kv_a_layernorm", (latent,))
    yield Weight(f"{at}.kv_b_proj", (heads * (plain + value), latent))
    yield Weight(f"{at}.o_proj", (hidden, heads * value))
    if bias:
        yield Weight(f"{at}.bias", ((low or 0) + latent + rope + hidden,))


def _list_gated(at: str, hidden: int, inner: int, *, bias: bool = False) -> Iterator[Weight]:
    for name in BEFORE_ACTIVATION:
        yield Weight(f"{at}.{name}", (inner, hidden))
    yield Weight(f"{at}.down_proj", (hidden, inner))
    if bias:
        yield Weight(f"{at}.bias", (2 * inner + hidden,))


def _head_size(kind: Family, config: Config) -> int:
    return int(config.get("head_dim") or kind.head_size or config["hidden_size"] // config["num_attention_heads"])


def _has_head_norm(kind: Family, config: Config) -> bool:
    return kind.head_norm != "none" or bool(config.get("use_qk_norm"))


def num_experts(config: Config) -> int:
    """Return the number of experts per layer; 0 for dense models."""
    return int(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0)


def _num_routed(config: Config) -> int:
    return int(config.get("num_experts_per_tok") or 2) if num_experts(config) else 0


def _is_sparse(config: Config, layer: int) -> bool:
    """Return True if this layer of a mixture-of-experts model has experts."""
    if isinstance(kinds := config.get("mlp_layer_types"), list):
        return bool(kinds[layer] == "sparse")
    if layer < (config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
