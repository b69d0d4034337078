"""Megatron's optimizer of one model: construction, and steps that skip non-finite gradients."""

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

from .overlap import ParameterGather, delay_grad_reduce
from .settings import Megatron
from .upstream.compat import (
    fix_saving_of_padded_buckets,
    fix_saving_without_experts,
    fix_sgd_loading,
    fuse_gradient_norms,
)
from .weights.bridge import optimizer_config
from .weights.shards import take_exact

DEFAULTS = {"optimizer": "adam", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8}
"""Defaults, as in trainer 'fsdp'."""
BUCKET_SIZE: int | None = None
"""Number of parameters of a bucket with overlap_grad_reduce; None for Megatron's default, at least 40 million."""


def wrap(chunks: Sequence[nn.Module], settings: Megatron) -> list[DistributedDataParallel]:
    """Wrap the chunks of a model in `DistributedDataParallel`, which sums fp32 gradients over data-parallel ranks."""
    config = chunks[0].config
    config.finalize_model_grads_func = _finish_gradients  # type: ignore[union-attr]
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        bucket_size=BUCKET_SIZE,
    )
    wrapped = [
        DistributedDataParallel(config=config, ddp_config=options, module=chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        fix_saving_of_padded_buckets(chunk)
    if settings.overlap_grad_reduce:
        delay_grad_reduce(wrapped, config, pipeline=settings.pipeline_parallel > 1)
    return wrapped


def _finish_gradients(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Finalize gradients without division by the number of tokens: loss weights already normalize the sum."""
    finalize_model_grads(model, None, **options)


class MegatronOptimizer:
    """The optimizer of one model. Implements `plasmid_training.rank.backend.RankOptimizer`."""

    def __init__(
        self, settings: Megatron, learning: LearningSettings, chunks: Sequence[DistributedDataParallel]
    ) -> None:
        """``settings`` are the trainer's, ``learning`` those of this model."""
        self._learning, self._chunks = learning, list(chunks)
        fuse_gradient_norms()
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
                overlap_param_gather=settings.overlap_param_gather,
            ),
            self._chunks,
        )
        # if only adapters of experts are trained, the first optimizer has no weights, and Megatron could not save it
        self.inner.chained_optimizers = [one for one in self.inner.chained_optimizers if not one.is_stub_optimizer]
        self._fill_main_weights()
        for part in self._parts():
            _start_state(part)
        self.fuse()
        fix_sgd_loading(self.inner)
        fix_saving_without_experts(self.inner)
        self._gather = ParameterGather(self._chunks) if settings.overlap_param_gather else None
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
        if self._gather is not None:
            self._gather.start()
        self._clear()
        return Update(norm, taken)

    def finish_gathering(self) -> None:
        """Complete the parameters of all ranks, before they are read or written outside of a forward pass."""
        if self._gather is not None:
            self._gather.finish()

    def state(self) -> Iterator[Tensor]:
        """Yield all tensors of the optimizer state, including main weights."""
        for part in self._parts():
            for group in part.param_groups:
                yield from group["params"]
            for state in part.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradient buffers."""
        for chunk in self._chunks:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def fuse(self) -> None:
        """Compute each step of torch's Adam in one kernel; called again after its settings and state were loaded."""
        for part in self._parts():
            if isinstance(part, Adam | AdamW):
                for group in part.param_groups:
                    group["fused"], group["foreach"] = True, False
                for parameter, state in part.state.items():
                    state["step"] = state["step"].to(parameter.device, torch.float32)

    def _parts(self) -> Iterator[Optimizer]:
        """Yield torch's optimizers: one for experts, one for all other weights."""
        for part in self.inner.chained_optimizers:
            yield part.optimizer

    @torch.no_grad()
    def _fill_main_weights(self) -> None:
        """Start from the values of the model folder: Megatron copies main weights from weights that may round them."""
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                values = take_exact(parameter)
                main: Tensor | None = getattr(parameter, "main_param", None)
                if values is None or main is None:  # fp32, frozen, or another data-parallel rank has it
                    continue
                if getattr(parameter, "main_param_sharded", False):
                    owner = next(o for o in self.inner.chained_optimizers if parameter in o.model_param_gbuf_map)
                    span = owner._get_model_param_range_map(parameter)["param"]
                    main.view(-1).copy_(values.view(-1)[span.start : span.end])
                else:
                    main.copy_(values)

    def _clear(self) -> None:
        """Clear the gradients."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.inner.zero_grad()

    def _clip(self, norm: float) -> None:
        for part in self.inner.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and 0 < self._learning.max_grad_norm < norm:
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=self._learning.max_grad_norm, total_norm=norm, use_decoupled_grad=False
                )


def _start_state(optimizer: Optimizer) -> None:
    """Allocate the state as the zeros that the first step starts from: memory is known early, saves are complete."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(optimizer, Adam | AdamW):
                zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **zeros}
            elif isinstance(optimizer, SGD) and group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
