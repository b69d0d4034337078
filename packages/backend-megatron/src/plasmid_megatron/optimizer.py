"""Megatron's optimizer of one model: its construction, the gradient's norm, one guarded step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from plasmid_training.learning_rate import learning_rate
from plasmid_training.learning_settings import LearningSettings
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from .bridge import optimizer_config
from .compat import let_ranks_without_experts_be_saved, let_sgd_be_loaded
from .settings import Megatron

DEFAULTS = {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
"""As those of trainer 'fsdp'."""


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    norm: float
    lr: float
    taken: bool
    """False if the gradient was not finite."""


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


class Updater:
    """One model's optimizer, the rate that it learns with, and its steps so far."""

    def __init__(
        self,
        settings: Megatron,
        learning: LearningSettings,
        chunks: Sequence[DistributedDataParallel],
        *,
        total_steps: int,
    ) -> None:
        """``settings`` say how weights are kept and updated, ``learning`` how fast."""
        self.step = 0
        """Optimizer steps since the start of the run, those that were skipped included."""
        self._learning, self._total_steps = learning, total_steps
        self._chunks = list(chunks)
        values = DEFAULTS | settings.optimizer
        self.optimizer = get_megatron_optimizer(
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
        for inner in self.inner():
            _start_state(inner)
        let_sgd_be_loaded(self.optimizer)
        let_ranks_without_experts_be_saved(self.optimizer)
        self.clear()

    def inner(self) -> Iterator[Optimizer]:
        """torch's optimizers: of all weights but experts, and of those."""
        for part in self.optimizer.chained_optimizers:
            if part.optimizer is not None:
                yield part.optimizer

    def clear(self) -> None:
        """Forget the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def update(self) -> Update:
        """One step along the gradients, which are gone afterwards. All ranks call it together."""
        lr = learning_rate(self._learning, step=self.step, total_steps=self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._learning.weight_decay * group.get("wd_mult", 1.0)
        overflow = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        taken = not overflow and math.isfinite(norm)
        if taken:
            self._clip(norm)
            self.optimizer.step_with_ready_grads()
        self.clear()
        self.step += 1
        return Update(norm, lr, taken)

    def _clip(self, norm: float) -> None:
        for part in self.optimizer.chained_optimizers:
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
