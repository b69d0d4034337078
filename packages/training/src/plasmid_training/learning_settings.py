"""Settings that every trainer has for one model: how its learning rate runs, and which weights are not trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from plasmid.components import Settings
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator

DECAY_ONLY = ("min_lr_fraction", "decay_steps")


class LearningSettings(Settings):
    """The learning rate of one model, the bound of its gradient, and which of its weights stay as they are."""

    lr: float = Field(1e-6, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises from `lr / warmup_steps` to `lr`."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """linear, cosine: the learning rate falls to this fraction of `lr`."""
    decay_steps: Literal["auto"] | int = "auto"
    """linear, cosine: optimizer step at which it has fallen, warm-up included; ``auto`` is the end of the run."""
    weight_decay: float = Field(0.0, ge=0)
    """Fraction of every weight that one step at learning rate 1 takes away; not of biases and norms."""
    max_grad_norm: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Gradients with a larger norm are scaled down to it; 0 turns this off."""
    freeze: Annotated[tuple[str, ...], INERT] = ()
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

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for name in DECAY_ONLY:
            if self.schedule == "constant" and self._is_set(name):
                yield f"{name} has no effect with schedule = 'constant'; remove it or change schedule"
        if self.schedule != "constant" and isinstance(self.decay_steps, int) and self.decay_steps <= self.warmup_steps:
            yield f"decay_steps = {self.decay_steps} must be more than warmup_steps = {self.warmup_steps}"


class CriticLearning(LearningSettings):
    """The critic: a value head on a backbone of its own. Everything not said here is as for the policy."""

    lr: float = Field(1e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate of the critic."""
    head_std: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of the value head's first weights, where its folder has none; 0 starts with values of 0."""
    export: bool = False
    """Write the critic beside the final policy, as the folder ``<name of the policy's>-critic``."""
