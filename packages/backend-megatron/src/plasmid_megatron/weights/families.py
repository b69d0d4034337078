"""Additions and corrections to mbridge's tables per model family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from mbridge.core.bridge import _MODEL_REGISTRY, Bridge
from mbridge.core.llm_bridge import LLMBridge
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from torch import Tensor
from torch.nn.functional import gelu
from transformers import PreTrainedConfig

Table = dict[str, list[str]]
SLIDING = "sliding_attention"
"""Kind of layers with a sliding window in ``layer_types`` of a config."""
SWIGLU_ALPHA = 1.702
"""Factor in the activation of gpt-oss, which configs of older releases of transformers do not have."""
LAYER = "model.layers.{layer_number}"


class Glm4Bridge(LLMBridge):  # type: ignore[misc]
    """GLM-4, dense: norms around attention and MLP, gate and up in one tensor, half of each head rotated in pairs."""

    _ATTENTION_MAPPING: ClassVar[Table] = {
        "self_attention.linear_qkv.layer_norm_weight": [f"{LAYER}.input_layernorm.weight"],  # with TransformerEngine
        "self_attention.linear_qkv.weight": [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"],
        "self_attention.linear_qkv.bias": [f"{LAYER}.self_attn.{part}_proj.bias" for part in "qkv"],
        "self_attention.linear_proj.weight": [f"{LAYER}.self_attn.o_proj.weight"],
        "self_attention.linear_proj.norm.weight": [f"{LAYER}.post_self_attn_layernorm.weight"],
    }
    _MLP_MAPPING: ClassVar[Table] = {
        "mlp.linear_fc1.layer_norm_weight": [f"{LAYER}.post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": [f"{LAYER}.mlp.gate_up_proj.weight"],
        "mlp.linear_fc2.weight": [f"{LAYER}.mlp.down_proj.weight"],
        "mlp.linear_fc2.norm.weight": [f"{LAYER}.post_mlp_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        return self._build_base_config(add_qkv_bias=self.hf_config.attention_bias, rotary_interleaved=True)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        percent = self.hf_config.partial_rotary_factor
        return {**super()._get_gptmodel_args(), "rotary_percent": percent}


class Gemma3Bridge(LLMBridge):  # type: ignore[misc]
    """Gemma 3, text only: norms around attention and MLP, GeGLU, and a sliding window in most layers."""

    _ATTENTION_MAPPING: ClassVar[Table] = {
        "self_attention.linear_qkv.weight": [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"],
        "self_attention.q_layernorm.weight": [f"{LAYER}.self_attn.q_norm.weight"],
        "self_attention.k_layernorm.weight": [f"{LAYER}.self_attn.k_norm.weight"],
        "self_attention.linear_proj.weight": [f"{LAYER}.self_attn.o_proj.weight"],
        "self_attention.linear_proj.norm.weight": [f"{LAYER}.post_attention_layernorm.weight"],
    }
    _MLP_MAPPING: ClassVar[Table] = {
        "pre_mlp_layernorm.weight": [f"{LAYER}.pre_feedforward_layernorm.weight"],
        "mlp.linear_fc1.weight": [f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"],
        "mlp.linear_fc2.weight": [f"{LAYER}.mlp.down_proj.weight"],
        "mlp.linear_fc2.norm.weight": [f"{LAYER}.post_feedforward_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        hf = self.hf_config
        return self._build_base_config(
            activation_func=partial(gelu, approximate="tanh"),
            layernorm_zero_centered_gamma=True,
            qk_layernorm=True,
            softmax_scale=hf.query_pre_attn_scalar**-0.5,
            window_size=(hf.sliding_window - 1, 0),
            window_attn_skip_freq=[int(kind == SLIDING) for kind in hf.layer_types],
        )


class GptOssBridge(LLMBridge):  # type: ignore[misc]
    """gpt-oss: attention sinks, windows in every other layer, and experts with biases in stacked tensors."""

    _ATTENTION_MAPPING: ClassVar[Table] = {
        "self_attention.linear_qkv.weight": [f"{LAYER}.self_attn.{part}_proj.weight" for part in "qkv"],
        "self_attention.linear_qkv.bias": [f"{LAYER}.self_attn.{part}_proj.bias" for part in "qkv"],
        "self_attention.linear_proj.weight": [f"{LAYER}.self_attn.o_proj.weight"],
        "self_attention.linear_proj.bias": [f"{LAYER}.self_attn.o_proj.bias"],
        "self_attention.core_attention.softmax_offset": [f"{LAYER}.self_attn.sinks"],
    }
    _MLP_MAPPING: ClassVar[Table] = {
        f"mlp.{name}": [f"{LAYER}.mlp.{name}"]
        for name in (
            "router.weight",
            "router.bias",
            "experts.gate_up_proj_bias",  # before the next name, which is a prefix of it
            "experts.gate_up_proj",
            "experts.down_proj_bias",
            "experts.down_proj",
        )
    }

    def _build_config(self) -> Any:
        hf = self.hf_config
        return self._build_base_config(
            add_bias_linear=True,
            softmax_type="learnable",
            window_size=(hf.sliding_window - 1, 0),
            window_attn_skip_freq=[int(kind == SLIDING) for kind in hf.layer_types],
            num_moe_experts=hf.num_local_experts,
            moe_router_topk=hf.num_experts_per_tok,
            moe_ffn_hidden_size=hf.intermediate_size,
            activation_func=partial(_scaled_silu, getattr(hf, "swiglu_alpha", SWIGLU_ALPHA)),
            activation_func_clamp_value=hf.swiglu_limit,
            glu_linear_offset=1.0,
        )


class LatentBridge(DeepseekV3Bridge):  # type: ignore[misc]
    """DeepSeek-V3 and R1, without multi-token prediction layers."""

    _ATTENTION_MAPPING: ClassVar[Table] = {
        **DeepseekV3Bridge._ATTENTION_MAPPING,
        # mbridge has only the names of TransformerEngine, in which norms are parts of other modules
        "self_attention.q_layernorm.weight": [f"{LAYER}.self_attn.q_a_layernorm.weight"],
        "self_attention.kv_layernorm.weight": [f"{LAYER}.self_attn.kv_a_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        hf = self.hf_config
        if not hasattr(hf, "first_k_dense_replace"):  # GLM-4.7-Flash has a list instead
            hf.first_k_dense_replace = hf.mlp_layer_types.count("dense")
        return super()._build_config()

    def _build_base_config(self, text_config_key: str | None = None, **values: Any) -> Any:
        values.pop("max_position_embeddings", None)  # not a field of Megatron-Core 0.16
        return super()._build_base_config(text_config_key, **values)


class Family:
    """How Megatron computes the models of one ``model_type``. Plugins subclass it and return an instance."""

    bridge: type[Bridge]
    """mbridge's class with the configuration and the names of weights; norms are separate modules in our layers."""
    needs_local_layers: ClassVar[bool] = False
    """True if the layers of TransformerEngine would compute a different function."""
    has_stacked_experts: ClassVar[bool] = False
    """True if `bridge` names tensors with all experts of a layer; otherwise those of a folder are split."""

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        """Yield the settings of the model that Megatron would compute differently, as ``setting = value``."""
        if getattr(hf, "hidden_act", "silu") != "silu":
            yield f"hidden_act = {hf.hidden_act!r}"
        if SLIDING in (getattr(hf, "layer_types", None) or ()):
            yield f"sliding_window = {hf.sliding_window}"

    def fields(self, hf: PreTrainedConfig) -> dict[str, Any]:
        """Return fields of `TransformerConfig` that mbridge omits, or reads from attributes moved in transformers 5."""
        return {}

    def embedding_scale(self, hf: PreTrainedConfig) -> float:
        """Return the factor of the input embeddings."""
        return 1.0

    def change_layer(self, layer: Any, hf: PreTrainedConfig, number: int) -> None:
        """Change the submodules of a layer's spec, a copy, before Megatron builds it; ``number`` counts from 0."""


class Plain(Family):
    """A family that mbridge supports without changes."""

    def __init__(self, model_type: str) -> None:
        self.bridge = _MODEL_REGISTRY[model_type]


class Glm4(Family):
    """GLM-4, whose outputs of attention and MLP are normalized before they are added to the hidden states."""

    bridge = Glm4Bridge

    def change_layer(self, layer: Any, hf: PreTrainedConfig, number: int) -> None:
        from ..model.modules import NormedRowParallelLinear

        layer.self_attention.submodules.linear_proj = layer.mlp.submodules.linear_fc2 = NormedRowParallelLinear


class Gemma3(Glm4):
    """Gemma 3, text only: layers with a sliding window have rotary positions of their own."""

    bridge = Gemma3Bridge
    needs_local_layers = True

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        if hf.hidden_activation != "gelu_pytorch_tanh":
            yield f"hidden_activation = {hf.hidden_activation!r}"
        for name in ("attention_bias", "attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(hf, name, None):
                yield f"{name} = {getattr(hf, name)}"
        if getattr(hf, "use_bidirectional_attention", False):
            yield "use_bidirectional_attention = true"

    def embedding_scale(self, hf: PreTrainedConfig) -> float:
        return float(hf.hidden_size**0.5)


class GptOss(Family):
    """gpt-oss, whose experts are stacked."""

    bridge = GptOssBridge
    needs_local_layers = True
    has_stacked_experts = True

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        if hf.hidden_act != "silu":
            yield f"hidden_act = {hf.hidden_act!r}"
        if not hf.attention_bias:
            yield "attention_bias = false"
        if hf.sliding_window is None and SLIDING in hf.layer_types:
            yield "no sliding_window"

    def change_layer(self, layer: Any, hf: PreTrainedConfig, number: int) -> None:
        from ..model.experts import StackedExperts

        layer.mlp.submodules.experts.module = StackedExperts


class RoutedBySigmoid(Family):
    """Experts chosen by sigmoids and corrections, in groups (DeepSeek-AI 2024)."""

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        yield from super().unsupported(hf)
        if not hf.norm_topk_prob:
            yield "norm_topk_prob = false"
        if hf.n_group > 1 and hf.num_experts_per_tok // hf.topk_group != 2:
            yield f"num_experts_per_tok = {hf.num_experts_per_tok} with topk_group = {hf.topk_group}"

    def fields(self, hf: PreTrainedConfig) -> dict[str, Any]:
        groups = {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group} if hf.n_group > 1 else {}
        return {
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_overlap": False,
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
            **groups,
        }


class Glm4Moe(RoutedBySigmoid):
    """GLM-4.5 to 4.7."""

    bridge = _MODEL_REGISTRY["glm4_moe"]

    def fields(self, hf: PreTrainedConfig) -> dict[str, Any]:
        return super().fields(hf) | {"add_qkv_bias": hf.attention_bias}


class DeepseekV3(RoutedBySigmoid):
    """DeepSeek-V3 and R1."""

    bridge = LatentBridge

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        yield from super().unsupported(hf)
        if not hf.rope_interleave:
            yield "rope_interleave = false"
        if _rope_type(hf) not in ("default", "yarn"):
            yield f"rope_type = {_rope_type(hf)!r}"

    def fields(self, hf: PreTrainedConfig) -> dict[str, Any]:
        return super().fields(hf) | {"attention_backend": "auto", "mtp_num_layers": None, **_latent_rope(hf)}


class Glm4MoeLite(DeepseekV3):
    """GLM-4.7-Flash: the attention of DeepSeek-V3 with the experts of GLM-4.5."""

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        yield from super().unsupported(hf)
        if hf.mlp_layer_types != sorted(hf.mlp_layer_types):  # dense layers come first
            yield f"mlp_layer_types = {hf.mlp_layer_types}"


OWN: dict[str, Callable[[], Family]] = {
    "gemma3_text": Gemma3,
    "glm4": Glm4,
    "glm4_moe": Glm4Moe,
    "glm4_moe_lite": Glm4MoeLite,
    "gpt_oss": GptOss,
    "deepseek_v3": DeepseekV3,
}


def built_in(model_type: str) -> Family:
    """Return one of the built-in families. mbridge has more, which were not compared with transformers."""
    from .linear_families import LinearAttention  # imports this module

    delta_nets = {
        "qwen3_next": ("qwen3_next", "Qwen3NextGatedDeltaNet"),
        "qwen3_5_text": ("qwen3_5", "Qwen3_5GatedDeltaNet"),
        "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet"),
    }
    if model_type in delta_nets:
        return LinearAttention(*delta_nets[model_type])
    return OWN[model_type]() if model_type in OWN else Plain(model_type)


def prepare(hf: PreTrainedConfig) -> None:
    """Copy the rotary settings, which transformers 5 has moved, to the attributes that mbridge reads."""
    rope = hf.rope_parameters or {}
    if not hasattr(hf, "rope_theta"):
        hf.rope_theta = rope.get("rope_theta", 10000.0)
    if not hasattr(hf, "partial_rotary_factor"):
        hf.partial_rotary_factor = rope.get("partial_rotary_factor", 1.0)


def _scaled_silu(alpha: float, x: Tensor) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def _latent_rope(hf: PreTrainedConfig) -> dict[str, Any]:
    rope = hf.rope_parameters or {}
    if _rope_type(hf) == "default":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "rotary_base": hf.rope_theta}
    original = rope.get("original_max_position_embeddings") or hf.max_position_embeddings
    return {
        "rope_type": "yarn",
        "rotary_base": hf.rope_theta,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": original,
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def _rope_type(hf: PreTrainedConfig) -> str:
    return str((hf.rope_parameters or {}).get("rope_type", "default"))
