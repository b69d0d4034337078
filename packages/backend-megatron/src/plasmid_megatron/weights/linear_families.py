"""Families with linear attention in most layers: Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

import torch
from mbridge.models.qwen2moe import Qwen2MoEBridge
from plasmid_models.linear_attention import LINEAR
from torch import Tensor
from transformers import PreTrainedConfig

from .families import LAYER, Family, Table

OF_LAYER = (
    "A_log",
    "dt_bias",
    "conv1d.weight",
    "norm.weight",
    "out_proj.weight",
    *(f"in_proj_{part}.weight" for part in ("qkvz", "ba", "qkv", "z", "b", "a")),
)
"""Weights of a gated delta net, by their names in transformers; Qwen3-Next has fused projections."""


class LinearBridge(Qwen2MoEBridge):  # type: ignore[misc]
    """Qwen3-Next and Qwen3.5, text only: centered norms, output gates, experts and a gated shared expert."""

    _ATTENTION_MAPPING: ClassVar[Table] = {
        **Qwen2MoEBridge._ATTENTION_MAPPING,
        **{f"self_attention.layer.{name}": [f"{LAYER}.linear_attn.{name}"] for name in OF_LAYER},
    }
    _MLP_MAPPING: ClassVar[Table] = {
        **Qwen2MoEBridge._MLP_MAPPING,
        "mlp.linear_fc1.weight": [f"{LAYER}.mlp.gate_proj.weight", f"{LAYER}.mlp.up_proj.weight"],
        "mlp.linear_fc2.weight": [f"{LAYER}.mlp.down_proj.weight"],
    }

    def _build_config(self) -> Any:
        hf, experts = self.hf_config, {}
        if getattr(hf, "num_experts", 0):
            experts = {
                "num_moe_experts": hf.num_experts,
                "moe_router_topk": hf.num_experts_per_tok,
                "moe_ffn_hidden_size": hf.moe_intermediate_size,
                "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
                "moe_shared_expert_gate": True,
            }
        return self._build_base_config(
            layernorm_zero_centered_gamma=True,
            qk_layernorm=True,
            attention_output_gate=True,
            linear_attention_freq=[int(kind == LINEAR) for kind in hf.layer_types],
            **experts,
        )

    def _get_gptmodel_args(self) -> dict[str, Any]:
        return {**super()._get_gptmodel_args(), "rotary_percent": self.hf_config.partial_rotary_factor}

    def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[Tensor]) -> Tensor:
        """Move gates: the folder has one after each query head, Megatron has a group's gates after its queries."""
        if "self_attention.linear_qkv." not in mcore_weights_name:
            found: Tensor = super()._weight_to_mcore_format(mcore_weights_name, hf_weights)
            return found
        groups, size, further = self.hf_config.num_key_value_heads, self.hf_config.head_dim, hf_weights[0].shape[1:]
        query, key, value = hf_weights
        query = query.view(groups, -1, 2, size, *further).transpose(1, 2).reshape(groups, -1, *further)
        return torch.cat([query, *(x.view(groups, size, *further) for x in (key, value))], dim=1).flatten(0, 1)

    def _weight_to_hf_format(self, mcore_weights_name: str, mcore_weights: Tensor) -> tuple[list[str], list[Tensor]]:
        if "self_attention.linear_qkv." not in mcore_weights_name:
            found: tuple[list[str], list[Tensor]] = super()._weight_to_hf_format(mcore_weights_name, mcore_weights)
            return found
        groups, size, further = self.hf_config.num_key_value_heads, self.hf_config.head_dim, mcore_weights.shape[1:]
        whole = mcore_weights.view(groups, -1, *further)
        query, key, value = torch.split(whole, [whole.shape[1] - 2 * size, size, size], dim=1)
        query = query.reshape(groups, 2, -1, size, *further).transpose(1, 2)
        names = self._weight_name_mapping_mcore_to_hf(mcore_weights_name)
        return names, [x.reshape(-1, *further) for x in (query, key, value)]


class LinearAttention(Family):
    """Qwen3-Next or Qwen3.5, text only. Layers with linear attention are those of transformers, and not split."""

    bridge = LinearBridge
    needs_local_layers = True

    def __init__(self, folder: str, layer: str) -> None:
        """``folder`` is that of the model in transformers, ``layer`` the name of the class of its gated delta net."""
        self._folder, self._layer = folder, layer

    def unsupported(self, hf: PreTrainedConfig) -> Iterator[str]:
        yield from super().unsupported(hf)
        if hf.attention_bias:
            yield "attention_bias = true"
        if getattr(hf, "mlp_only_layers", None):
            yield f"mlp_only_layers = {hf.mlp_only_layers}"
        if getattr(hf, "decoder_sparse_step", 1) != 1:
            yield f"decoder_sparse_step = {hf.decoder_sparse_step}"

    def change_layer(self, layer: Any, hf: PreTrainedConfig, number: int) -> None:
        from megatron.core.transformer.spec_utils import ModuleSpec

        from ..model.linear_attention import GatedDeltaNet, OutputGatedAttention

        if hf.layer_types[number] != LINEAR:
            layer.self_attention.module = OutputGatedAttention
            return
        models = import_module(f"transformers.models.{self._folder}.modeling_{self._folder}")
        options = {"layer": getattr(models, self._layer), "hf": hf}
        layer.self_attention = ModuleSpec(module=GatedDeltaNet, params=options)
