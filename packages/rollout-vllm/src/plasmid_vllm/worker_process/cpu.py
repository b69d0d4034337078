"""vLLM worker on the CPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip  (vLLM requires this import to be first)

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from .gpu import PolicyWorker, RecordingWorker

dispatch_packed = utils.dispatch_cpu_unquantized_gemm


def dispatch_plain(layer: Any, remove_weight: bool) -> None:
    """Make a linear layer use its own weight. vLLM's packed copy would not receive weight syncs."""
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        dispatch_packed(layer, remove_weight)


class PlainExperts(cpu_moe.CPUUnquantizedExperts):  # type: ignore[misc]
    """Experts that are computed one after another from the weights as they were loaded.

    vLLM's kernels would rearrange these weights after loading, so weight syncs could not write them.
    """

    @classmethod
    def _supports_grouped_gemm(cls, moe_config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the weights as they are."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Write the weighted sum [n, hidden] of the chosen experts [n, k] to ``output``."""
        local = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        total = torch.zeros(hidden_states.shape, dtype=torch.float32)
        for expert in range(len(w1)):
            tokens, choices = torch.where(local == expert)
            if not len(tokens):
                continue
            bias = (None, None) if self.w1_bias is None else (self.w1_bias[expert], self.w2_bias[expert])
            inner = F.linear(hidden_states[tokens], w1[expert], bias[0])
            gated = apply_moe_activation(activation, inner.new_empty(len(tokens), w2.shape[-1]), inner)
            found = F.linear(gated, w2[expert], bias[1]).float()
            weights = 1.0 if apply_router_weight_on_input else topk_weights[tokens, choices, None]
            total.index_add_(0, tokens, found * weights)
        output.copy_(total)


class CpuPolicyWorker(PolicyWorker, CPUWorker):  # type: ignore[misc]
    """`PolicyWorker` on the CPU."""

    def load_model(self, **kwargs: Any) -> None:
        """Load the model without packed copies of its weights."""
        utils.dispatch_cpu_unquantized_gemm = dispatch_plain
        cpu_moe.X86CPUUnquantizedExperts = cpu_moe.CPUUnquantizedExperts = PlainExperts
        super().load_model(**kwargs)


class CpuRecordingWorker(RecordingWorker, CpuPolicyWorker):
    """`RecordingWorker` on the CPU."""
