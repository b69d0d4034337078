"""Megatron's optimizer of one model: its construction, the gradient's norm, one guarded step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from plasmid_training.learning_settings import LearningSettings
from plasmid_training.rank.backend import Update
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .settings import Megatron
from .upstream.compat import let_ranks_without_experts_be_saved, let_sgd_be_loaded
from .weights.bridge import optimizer_config

DEFAULTS = {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
"""As those of trainer 'fsdp'."""


def wrap(chunks: Sequence[nn.Module], settings: Megatron) -> list[DistributedDataParallel]:
    """Give the parts of a model gradients that are summed, in fp32, over the ranks that have the same part."""
    config = chunks[0].config
    config.finalize_model_grads_func = _finish_gradients  # type: ignore[union-attr]
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_grad_reduce=False,
    )
    return [
        DistributedDataParallel(config=config, ddp_config=options, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def _finish_gradients(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Loss weights already make the sum over ranks right, so nothing is divided by a number of tokens."""
    finalize_model_grads(model, None, **options)


class MegatronOptimizer:
    """The optimizer of one model. Implements `plasmid_training.rank.backend.RankOptimizer`."""

    def __init__(
        self, settings: Megatron, learning: LearningSettings, chunks: Sequence[DistributedDataParallel]
    ) -> None:
        """``settings`` say how weights are kept and updated, ``learning`` how fast."""
        self._learning, self._chunks = learning, list(chunks)
        values = DEFAULTS | settings.optimizer
        self.inner = get_megatron_optimizer(
            optimizer_config(
                **values,
                lr=learning.lr,
                weight_decay=learning.weight_decay,
                clip_grad=learning.max_grad_norm,
                bf16=settings.dtype == "bfloat16",
                params_dtype=settings.dtype,
                use_distributed_optimizer=settings.distributed_optimizer,
            ),
            self._chunks,
        )
        for part in self._parts():
            _start_state(part)
        let_sgd_be_loaded(self.inner)
        let_ranks_without_experts_be_saved(self.inner)
        self._clear()

    def step(self, lr: float) -> Update:
        for group in self.inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._learning.weight_decay * group.get("wd_mult", 1.0)
        overflow = self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        taken = not overflow and math.isfinite(norm)
        if taken:
            self._clip(norm)
            self.inner.step_with_ready_grads()
        self._clear()
        return Update(norm, taken)

    def state(self) -> Iterator[Tensor]:
        """All of its tensors that a step reads and writes, main weights included."""
        for part in self._parts():
            for group in part.param_groups:
                yield from group["params"]
            for state in part.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def gradients(self) -> Iterator[Tensor]:
        """What gradients are summed in."""
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def _parts(self) -> Iterator[Optimizer]:
        """torch's optimizers: of all weights but experts, and of those."""
        for part in self.inner.chained_optimizers:
            if part.optimizer is not None:
                yield part.optimizer

    def _clear(self) -> None:
        """Forget the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def _clip(self, norm: float) -> None:
        for part in self.inner.chained_optimizers:
            parameters = part.get_parameters() if part.optimizer is not None else []
            if parameters and 0 < self._learning.max_grad_norm < norm:
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self._learning.max_grad_norm, total_norm=norm, use_decoupled_grad=False
                )


def _start_state(optimizer: Optimizer) -> None:
    """The state as zeros, which is what the first step starts from: memory is known early, a save has all of it."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, Adam | AdamW):
                zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **zeros}
            elif isinstance(optimizer, SGD) and group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
