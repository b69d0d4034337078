"""Registers trainer ``bigram`` and engine ``bigram``. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from plasmid import (
    BuildContext,
    Component,
    RecipeView,
    RolloutEngine,
    RolloutEngineConfig,
    Trainer,
    hookimpl,
)
from plasmid.components import CanaryPlan
from plasmid.errors import ConfigError
from plasmid_models.folder import read_config
from plasmid_training.learning_settings import RankedTrainerConfig
from pydantic import Field


class BigramEngineConfig(RolloutEngineConfig):
    """Samples from a bigram model in one process on the CPU."""

    kind: Literal["bigram"] = "bigram"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights."""
    bucket_bytes: int = Field(1 << 20, ge=1)
    """Maximum size of a weight-sync bucket, in bytes."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for key, sampling in ({**recipe.samplings, **recipe.eval_samplings} if recipe else {}).items():
            if sampling.stop:
                yield f"{key}.stop: engine 'bigram' has no tokenizer; use stop_token_ids"
            for name, neutral in (("top_p", 1.0), ("top_k", "all"), ("min_p", 0.0)):
                if getattr(sampling, name) != neutral:
                    yield f"{key}.{name}: engine 'bigram' samples from all tokens; remove it"

    def sampling_settings(self) -> frozenset[str]:
        return frozenset({"ignore_eos"})

    def canary(self) -> CanaryPlan:
        """Compare its log-probabilities with the trainer's: the checksums of a sync only prove the bytes."""
        return CanaryPlan(tolerance=0.001)

    def check(self, recipe: RecipeView) -> None:
        check_model(recipe)
        ranks = recipe.placement.engine_ranks
        if ranks > 1:
            raise ConfigError(f"placement.engine_ranks: must be 1 for engine 'bigram', got {ranks}")

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .engine import start_engine

        return await start_engine(self, context)


class BigramTrainerConfig(RankedTrainerConfig):
    """Trains a bigram model with SGD, on any number of ranks, each of which has all weights."""

    kind: Literal["bigram"] = "bigram"
    lr: float = Field(1.0, ge=0)
    """Peak learning rate."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type to which the weights are rounded before they are used; ``auto`` is the engine's."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name in ("weight_decay", "freeze", "logprob_chunk", "routing_replay"):
            if self._is_set(name):
                yield f"{name} has no effect with trainer 'bigram'; remove it"
        if recipe is not None and recipe.needs.critic:
            yield f"{recipe.key}.kind: trainer 'bigram' has no critic; choose another algorithm"

    def check(self, recipe: RecipeView) -> None:
        check_model(recipe)

    async def build(self, context: BuildContext) -> Trainer:
        from plasmid_training.driver.ranked_trainer import start_ranks

        from .rank import make_backend

        return await start_ranks(context, make_backend, microbatching=self.microbatching("packed", {}))


def check_model(recipe: RecipeView) -> None:
    """Raise `ConfigError` unless the model is a bigram model."""
    found = read_config("model", Path(recipe.model.path)).get("model_type")
    if found != "bigram":
        raise ConfigError(f"model.path: {recipe.model.path} must have model_type 'bigram', got {found!r}")


@hookimpl
def register_components() -> list[type[Component]]:
    return [BigramEngineConfig, BigramTrainerConfig]
