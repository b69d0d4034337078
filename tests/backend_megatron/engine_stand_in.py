"""Stand-in for TransformerEngine, which can only be built with CUDA.

It has the constructors, weight names and calls that Megatron-Core 0.16.1 uses, and computes them with torch on one
rank. Tests show what is passed to TransformerEngine, not what TransformerEngine does with it.
"""

import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

IMPORTED = {
    "common": (),
    "common.recipe": ("DelayedScaling",),
    "pytorch.distributed": ("CudaRNGStatesTracker", "activation_recompute_forward"),
    "pytorch.fp8": ("FP8GlobalStateManager", "fp8_autocast"),
    "pytorch.ops": ("FusibleOperation", "Sequential"),
    "pytorch.router": (
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    ),
    "pytorch.tensor": ("QuantizedTensor",),
}
"""Names that Megatron-Core imports or uses in annotations, but does not call here."""


def _mark(weight, dim):
    weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, dim, 1


class _Module(nn.Module):
    """Has no state besides its weights, like TransformerEngine's modules without fp8."""

    fp8, fp8_calibration, fp8_meta = False, False, {"fp8_checkpoint": False}

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert not state.numel()


class RMSNorm(_Module):
    def __init__(self, hidden_size, eps, *, sequence_parallel, zero_centered_gamma, params_dtype, device):
        super().__init__()
        assert not zero_centered_gamma
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.eps = eps

    def forward(self, x):
        return rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(_Module):
    def __init__(self, in_features, out_features, *, parallel_mode, bias, return_bias, params_dtype, device, **options):
        super().__init__()
        assert options["tp_size"] == 1 and not return_bias
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        _mark(self.weight, int(parallel_mode == "row"))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device)) if bias else None

    def forward(self, x, is_first_microbatch=None):
        return linear(x, self.weight, self.bias)


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, **options):
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        self.layer_norm_weight = nn.Parameter(self.weight.new_ones(in_features))
        self.eps = eps

    def forward(self, x, is_first_microbatch=None):
        return super().forward(rms_norm(x, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class GroupedLinear(_Module):
    def __init__(self, num_gemms, in_features, out_features, *, parallel_mode, bias, params_dtype, device, **options):
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            _mark(weight, int(parallel_mode == "row"))
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x, m_splits, is_first_microbatch=None):
        parts = x.split(list(m_splits))
        return torch.cat([linear(part, getattr(self, f"weight{n}")) for n, part in enumerate(parts)])


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads, kv_channels, *, softmax_scale, attention_dropout, **options):
        super().__init__()
        assert attention_dropout == 0.0
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *, attn_mask_type, qkv_format, cu_seqlens_q, **options):
        assert (qkv_format, attn_mask_type, attention_mask) == ("thd", "padding_causal", None)
        assert torch.equal(cu_seqlens_q, options["cu_seqlens_kv"]) and cu_seqlens_q.dtype == torch.int32
        assert options["max_seqlen_q"] == options["max_seqlen_kv"] == int(cu_seqlens_q.diff().max())
        parts = []
        for start, end in pairwise(cu_seqlens_q.tolist()):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            gqa = q.shape[1] != k.shape[1]
            parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=gqa)[0])
        return torch.cat([part.transpose(0, 1) for part in parts]).flatten(1)


def install():
    """Make ``import transformer_engine`` find the stand-in. Call it before Megatron is imported."""
    pytorch = _module("transformer_engine.pytorch")
    for cls in (RMSNorm, Linear, LayerNormLinear, GroupedLinear, DotProductAttention):
        setattr(pytorch, cls.__name__, cls)
    for name, contents in IMPORTED.items():
        _module(f"transformer_engine.{name}", **dict.fromkeys(contents, nn.Module))


def _module(name, **contents):
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    parent, _, last = name.rpartition(".")
    if parent:
        if parent not in sys.modules:
            _module(parent, __version__="2.11.0")
        setattr(sys.modules[parent], last, module)
    sys.modules[name] = module
    return module
