"""Experts of a layer: matrix products that are computed together, and replay of the experts that the engine chose.

Megatron-Core has grouped matrix products only for TransformerEngine and for its own library; without either, it
computes one expert after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from plasmid_models.lora.experts import add_terms, grouped_linear
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, one_hot

FUSED = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
"""transformers' name of the experts' parameter by Megatron's name of the linear layer."""
ALIGNMENT = 16
"""Bytes that the length of every row must be a multiple of."""


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """The experts of this rank, with the weights and names of Megatron's `SequentialMLP`."""

    def __init__(self, num_local_experts: int, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(num_local_experts, config, *args, **options)
        weights = [weight for expert in self.local_experts for weight in expert.parameters()]
        self.adapter = nn.ModuleDict()
        """Adapters of projections of the experts."""
        self.is_plain = (
            config.gated_linear_unit
            and not config.add_bias_linear
            and not config.moe_apply_probs_on_input
            and config.activation_func_clamp_value is None
            and not config.glu_linear_offset
        )
        """Whether the experts can have adapters: gated, without biases and limits."""
        self._is_grouped = (
            num_local_experts > 1
            and self.is_plain
            and all(size * weight.element_size() % ALIGNMENT == 0 for weight in weights for size in weight.shape)
        )

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return [t, H] outputs, and None as the bias, of tokens [t, H] sorted by expert and weighted by ``probs``."""
        if not self._is_grouped and not self.adapter:
            result: tuple[Tensor, None] = super().forward(hidden, tokens_per_expert, probs)
            return result
        bounds = tokens_per_expert.to(hidden.device).cumsum(0).to(torch.int32)
        gate, up = self._product(hidden, bounds, "linear_fc1").chunk(2, dim=-1)
        inner = self.config.activation_func(gate) * up
        inner = (inner * probs[:, None]).to(inner.dtype)
        return self._product(inner, bounds, "linear_fc2"), None

    def _product(self, x: Tensor, bounds: Tensor, name: str) -> Tensor:
        weights = [getattr(expert, name).weight for expert in self.local_experts]
        out: Tensor
        if self._is_grouped:
            out = _GroupedLinear.apply(x, bounds, *weights)  # type: ignore[no-untyped-call]
        else:
            out = grouped_linear(x, torch.stack(weights), bounds)
        return add_terms(out, x, bounds, self.adapter.values(), FUSED[name])  # type: ignore[arg-type]


class _GroupedLinear(torch.autograd.Function):
    """Product of tokens [t, in], sorted by expert, with each expert's weight [out, in].

    The weights are separate parameters, so they are stacked for each product, and again in the backward pass: kept
    for it, the copies of all layers would double the memory of the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bounds: Tensor, *weights: Tensor) -> Tensor:
        """Return [t, out]; expert i has the tokens from ``bounds[i - 1]`` to ``bounds[i]``."""
        ctx.save_for_backward(x, bounds, *weights)
        return grouped_mm(x, torch.stack(weights).mT, offs=bounds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bounds, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = grouped_mm(grad, torch.stack(weights), offs=bounds) if ctx.needs_input_grad[0] else None
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            of_weights = grouped_mm(grad.mT, x, offs=bounds).unbind()
        return of_x, None, *of_weights


def mark_experts(weight: nn.Parameter, config: Any) -> None:
    """Set Megatron's attributes of a weight whose first dimension are the experts of this rank."""
    set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)  # counted in the norm
    # other ranks of the tensor-parallel group have other experts, or other tokens for the same
    weight.allreduce = config.expert_model_parallel_size == config.tensor_model_parallel_size == 1  # type: ignore[attr-defined]


class StackedExperts(MegatronModule):  # type: ignore[misc]
    """The experts of this rank as one tensor per matrix, in the layout of gpt-oss folders, with biases.

    Gate and up are interleaved, and clamped. Expert-parallel ranks split the first dimension, E experts.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        """Ignores ``submodules``, the layers of Megatron's experts."""
        super().__init__(config)
        assert config.expert_tensor_parallel_size == 1, "Megatron refuses to split experts with biases"
        self._ranks, self._copies = pg_collection.ep, pg_collection.expt_dp
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        shapes = {
            "gate_up_proj": (hidden, 2 * inner),
            "gate_up_proj_bias": (2 * inner,),
            "down_proj": (inner, hidden),
            "down_proj_bias": (hidden,),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(num_local_experts, *shape, dtype=config.params_dtype, device=device))
            mark_experts(weight, config)
            self.register_parameter(name, weight)
        self._is_grouped = all(size * weight.element_size() % ALIGNMENT == 0 for size in (hidden, inner))

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Return [t, H] outputs, and None as the bias, of tokens [t, H] sorted by expert and weighted by ``probs``."""
        counts, limit = tokens_per_expert.to(hidden.device), self.config.activation_func_clamp_value
        chosen = torch.repeat_interleave(
            torch.arange(len(counts), device=counts.device), counts, output_size=len(hidden)
        )
        # a product, as its backward pass sums in a fixed order, unlike that of indexing
        members = one_hot(chosen, len(counts)).to(hidden.dtype)  # [t, E]
        inner = self._product(hidden, self.gate_up_proj, counts) + members @ self.gate_up_proj_bias
        gate, up = inner[:, ::2].clamp(max=limit), inner[:, 1::2].clamp(-limit, limit)
        inner = self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
        out = self._product(inner, self.down_proj, counts) + members @ self.down_proj_bias
        return (out * probs[:, None]).to(out.dtype), None

    def _product(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Return [t, out], the product of each expert's tokens with its matrix of ``weight`` [E, in, out]."""
        if self._is_grouped:
            out: Tensor = grouped_mm(x, weight, offs=counts.cumsum(0).to(torch.int32))
            return out
        parts = zip(torch.split(x, counts.tolist()), weight, strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        """Return the places of the weights in a checkpoint."""
        split = (len(sharded_offsets), self._ranks.rank(), self._ranks.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                weight,
                *sharded_offsets,
                split,
                replica_id=(0, 0, self._copies.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
            for name, weight in self.named_parameters()
        }


class RoutingReplay:
    """Makes the routers of a model chunk choose given experts; their weights come from the routers' scores."""

    def __init__(self, chunk: nn.Module) -> None:
        self._choices: list[_Choice] = []
        for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
            router.router_replay = choice = _Choice(router.layer_number - 1)
            self._choices.append(choice)

    def set(self, experts: Tensor | None) -> None:
        """Replay the experts [n, layers, choices] of the next forward pass; None to let routers choose."""
        for choice in self._choices:
            choice.experts = experts


class _Choice:
    """The choice of one router; Megatron-Core calls it in place of its own."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self.experts: Tensor | None = None

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, default: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return [n, choices] scores and expert ids, as ``default`` would choose them unless they are known."""
        found: Sequence[Tensor] = default(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.experts is None:
            return found[0], found[1]
        given = self.experts[:, self._layer].long()
        indices = torch.where(given < 0, found[1], given)
        return scores.gather(1, indices), indices
