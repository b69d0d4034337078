"""Replay of the experts that the engine chose for each token of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from plasmid.errors import ModelError
from plasmid_models.routing import expert_blocks
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel


class RoutingReplay:
    """Makes the routers of a model choose given experts, also when activations are recomputed.

    Families of transformers differ in how they compute the weights of experts, but all choose them with `torch.topk`
    over the scores of all experts. Only the choice is replaced, so weights are as the family computes them, from the
    current scores, and gradients reach the router.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.experts: Tensor | None = None
        """[n, layers, choices] the experts of the n tokens of the microbatch, -1 if unknown; None to let routers
        choose."""
        for layer, (block, experts) in expert_blocks(lm).items():
            self._wrap(layer, block, experts)

    def _wrap(self, layer: int, block: nn.Module, experts: Any) -> None:
        forward, num_experts = block.forward, int(experts.num_experts)

        def replay(*args: Any, **options: Any) -> Any:
            if self.experts is None:
                return forward(*args, **options)
            choice = _Choice(self.experts[:, layer].long(), num_experts)
            with choice:
                output = forward(*args, **options)
            if not choice.was_made:
                name = type(block).__name__
                raise ModelError(f"trainer.routing_replay: {name} does not choose experts by topk; remove the setting")
            return output

        block.forward = replay


class _Choice(TorchFunctionMode):
    """Replaces the result of the `torch.topk` that chooses the experts of n tokens."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self.was_made = False
        self._experts, self._num_experts = experts, num_experts

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._experts.shape:
            return found
        scores = args[0]
        if scores.shape[-1] != self._num_experts:
            return found  # groups of experts
        self.was_made = True
        indices = torch.where(self._experts < 0, found.indices, self._experts)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
