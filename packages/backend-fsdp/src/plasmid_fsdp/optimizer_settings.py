"""Optimizer settings: the policy's are in ``[trainer]``, the critic's in ``[trainer.critic]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plasmid.components import RecipeView
from plasmid_training.learning_settings import CriticLearning, LearningSettings
from pydantic import Field, field_validator

OPTIMIZER_ONLY = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}


class OptimizerSettings(LearningSettings):
    """Optimizer, learning-rate schedule and frozen parameters of one model."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer algorithm."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay rates of the running averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """adamw: term added to the denominator for numerical stability."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """sgd: momentum factor."""
    nesterov: bool = False
    """sgd: use Nesterov momentum."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"both must be at least 0 and below 1, got {list(value)}")
        return value

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name, owner in OPTIMIZER_ONLY.items():
            if self.optimizer != owner and self._is_set(name):
                yield f"{name} has no effect with optimizer = {self.optimizer!r}; remove it"
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            yield "nesterov needs a momentum above 0"


class CriticSettings(CriticLearning, OptimizerSettings):
    """The critic: a value head on its own backbone. Settings that are not listed here are as for the policy."""
