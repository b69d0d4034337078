"""The settings of the FSDP2 trainer."""

from __future__ import annotations

import re
from typing import Literal, Self

from plasmid.components import BuildContext, TrainerConfig
from plasmid.protocols import Trainer
from pydantic import Field, field_validator, model_validator

OPTIMIZER_ONLY = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}
DECAY_ONLY = ("min_lr_fraction", "decay_steps")


class FSDP(TrainerConfig):
    """PyTorch FSDP2 over Hugging Face models: parameters, gradients and optimizer are sharded over the ranks.

    Weights and optimizer are always kept in fp32, and gradients are always summed in fp32, whatever `dtype` says.
    """

    kind: Literal["fsdp"] = "fsdp"
    lr: float = Field(1e-6, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """How gradients change the weights."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay of the averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """adamw: added to the divisor."""
    weight_decay: float = Field(0.0, ge=0)
    """Fraction of every weight that one step at learning rate 1 takes away; not of biases and norms."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """sgd: how much of the last step is added to the next."""
    nesterov: bool = False
    """sgd: look ahead along the momentum."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises from `lr / warmup_steps` to `lr`."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """linear, cosine: the learning rate falls to this fraction of `lr`."""
    decay_steps: Literal["auto"] | int = "auto"
    """linear, cosine: optimizer step at which it has fallen, warm-up included; ``auto`` is the end of the run."""
    max_grad_norm: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Gradients with a larger norm are scaled down to it; 0 turns this off."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What forward and backward compute in."""
    activation_checkpointing: bool = False
    """Keep only the input of every decoder layer for the backward pass and compute the rest again."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer in host memory and compute on the GPU layer by layer."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Longest microbatch of one rank in tokens, padding included; a longer sample travels alone."""
    microbatch_samples: Literal["auto"] | int = "auto"
    """Fixed number of samples in a microbatch; ``auto`` fills microbatches up to `microbatch_tokens`."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Implementation of attention."""
    logprob_chunk: int = Field(512, ge=1)
    """Tokens whose logits exist at one time, when log-probabilities are computed from hidden states."""
    freeze: tuple[str, ...] = ()
    """Regular expressions; parameters whose Hugging Face name one of them is found in are not trained."""

    @field_validator("freeze")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value

    @field_validator("betas")
    @classmethod
    def _decay(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"both must be at least 0 and below 1, got {list(value)}")
        return value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        for name, owner in OPTIMIZER_ONLY.items():
            if self.optimizer != owner and self._is_set(name):
                raise ValueError(f"{name} has no effect with optimizer = {self.optimizer!r}; remove it")
        for name in DECAY_ONLY:
            if self.schedule == "constant" and self._is_set(name):
                raise ValueError(f"{name} has no effect with schedule = 'constant'; remove it or change schedule")
        if self.microbatch_samples != "auto" and self._is_set("microbatch_tokens"):
            raise ValueError("microbatch_tokens has no effect where microbatch_samples is set; remove one of them")
        return self

    @model_validator(mode="after")
    def _numbers_fit(self) -> Self:
        if isinstance(self.microbatch_samples, int) and self.microbatch_samples < 1:
            raise ValueError(f"microbatch_samples must be 'auto' or at least 1, got {self.microbatch_samples}")
        if isinstance(self.decay_steps, int) and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps = {self.decay_steps} must be more than warmup_steps = {self.warmup_steps}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    async def build(self, context: BuildContext) -> Trainer:
        """Start one process for each rank. Raises `ConfigError` or `ModelError` before any is started, where it can."""
        from .trainer import start

        return await start(self, context)
