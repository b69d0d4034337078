"""Settings of one optimizer: the policy's are in the trainer's own table, the critic's in one below it."""

from __future__ import annotations

import re
from typing import Literal, Self

from plasmid.components import Settings
from pydantic import Field, field_validator, model_validator

OPTIMIZER_ONLY = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}
DECAY_ONLY = ("min_lr_fraction", "decay_steps")


class OptimizerSettings(Settings):
    """How one model's weights are changed by its gradient, and which of them."""

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
        return self

    @model_validator(mode="after")
    def _rates_fit(self) -> Self:
        if isinstance(self.decay_steps, int) and self.decay_steps <= self.warmup_steps:
            raise ValueError(f"decay_steps = {self.decay_steps} must be more than warmup_steps = {self.warmup_steps}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class CriticSettings(OptimizerSettings):
    """The critic: a value head on a backbone of its own. Everything not said here is as for the policy."""

    lr: float = Field(1e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate of the critic."""
    head_std: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of the value head's first weights, where its folder has none; 0 starts with values of 0."""
    export: bool = False
    """Write the critic beside the final policy, as the folder ``<name of the policy's>-critic``."""
