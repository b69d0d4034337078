"""Settings of one optimizer: the policy's are in the trainer's own table, the critic's in one below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plasmid_training.learning_settings import CriticLearning, LearningSettings
from pydantic import Field, field_validator

OPTIMIZER_ONLY = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}


class OptimizerSettings(LearningSettings):
    """How one model's weights are changed by its gradient, and which of them."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """How gradients change the weights."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay of the averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """adamw: added to the divisor."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """sgd: how much of the last step is added to the next."""
    nesterov: bool = False
    """sgd: look ahead along the momentum."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"both must be at least 0 and below 1, got {list(value)}")
        return value

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for name, owner in OPTIMIZER_ONLY.items():
            if self.optimizer != owner and self._is_set(name):
                yield f"{name} has no effect with optimizer = {self.optimizer!r}; remove it"
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            yield "nesterov needs a momentum above 0"


class CriticSettings(CriticLearning, OptimizerSettings):
    """The critic: a value head on a backbone of its own. Everything not said here is as for the policy."""
