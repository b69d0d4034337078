"""Settings that all trainers share, for one model: learning-rate schedule, gradient clipping, frozen parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from plasmid.components import RecipeView, Settings, TrainerConfig
from plasmid.errors import ModelError
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator

from .batches.sample_costs import attention_length
from .batches.schedule import Microbatching

NOT_COMPILED_ERROR = (
    "trainer.activation_memory_budget: needs compiled layers, but trainer.compile = 'auto' compiles none here; remove "
    "the setting, or set compile = true"
)
DECAY_ONLY = ("min_lr_fraction", "decay_steps")


def check_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns. Raises ValueError if one is not a valid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a valid regular expression: {error}") from None
    return patterns


def check_frozen(names: Collection[str], patterns: Sequence[str], key: str) -> None:
    """Raise `ModelError` if a pattern of the setting ``key`` matches none of the names of parameters, or if all names
    match."""
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ModelError(f"{key}: {pattern!r} matches no parameter; parameters are named like {next(iter(names))}")
    if all(any(re.search(pattern, name) for pattern in patterns) for name in names):
        raise ModelError(f"{key}: {list(patterns)} freezes all parameters; at least one must be trained")


class LearningSettings(Settings):
    """Learning-rate schedule, gradient clipping and frozen parameters of one model."""

    lr: float = Field(1e-6, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Number of optimizer steps over which the learning rate rises linearly from `lr / warmup_steps` to `lr`."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """linear, cosine: final learning rate as a fraction of `lr`."""
    decay_steps: Literal["auto"] | int = "auto"
    """linear, cosine: optimizer step at which the decay ends, counted from the start of the run, warm-up included;
    ``auto`` is the end of the run."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay coefficient; biases and norms are not decayed."""
    max_grad_norm: float = Field(1.0, ge=0, allow_inf_nan=False)
    """Maximum gradient norm; larger gradients are scaled down to it. 0 disables clipping."""
    freeze: Annotated[tuple[str, ...], INERT] = ()
    """Regular expressions; parameters whose Hugging Face name matches one of them (`re.search`) are not trained."""

    @field_validator("freeze")
    @classmethod
    def _check_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return check_patterns(value)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name in DECAY_ONLY:
            if self.schedule == "constant" and self._is_set(name):
                yield f"{name} has no effect with schedule = 'constant'; remove it or change schedule"
        if self.schedule != "constant" and isinstance(self.decay_steps, int) and self.decay_steps <= self.warmup_steps:
            yield f"decay_steps = {self.decay_steps} must be more than warmup_steps = {self.warmup_steps}"


class CriticLearning(LearningSettings):
    """The critic: a value head on its own backbone. All other settings are those of the policy."""

    lr: float = Field(1e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate of the critic."""
    head_std: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of the value head's initial weights if the model folder has none; 0 makes all initial values
    0."""
    export: bool = False
    """Export the critic next to the final policy, to a folder named ``<policy folder>-critic``."""


class RankedTrainerConfig(LearningSettings, TrainerConfig):
    """Settings of trainers that run one process per rank."""

    critic: CriticLearning = CriticLearning()
    """Learning rate and initial weights of the critic, for algorithms that have one."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Maximum number of tokens in a microbatch of one model replica, padding included. A longer sample gets its own
    microbatch."""
    microbatch_samples: Literal["auto"] | int = "auto"
    """Fixed number of samples per microbatch; ``auto`` fills microbatches up to `microbatch_tokens`."""
    logprob_chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Maximum number of tokens whose logits are in memory at once; ``auto`` limits the logits to 1.25 GiB on a GPU and
    128 MiB on a CPU."""

    routing_replay: bool = False
    """Route each token of a mixture of experts to the experts that the engine chose when it sampled, in training and
    in scores of the policy. The experts' weights are computed from the trainer's own router."""

    def replays_routing(self) -> bool:
        return self.routing_replay

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.microbatch_samples != "auto" and self._is_set("microbatch_tokens"):
            yield "microbatch_tokens has no effect if microbatch_samples is set; remove one of them"
        if isinstance(self.microbatch_samples, int) and self.microbatch_samples < 1:
            yield f"microbatch_samples must be 'auto' or at least 1, got {self.microbatch_samples}"
        if recipe is not None and self._is_set("critic") and not recipe.needs.critic:
            yield "trainer.critic: has no effect, because the algorithm has no critic; remove the table"

    def microbatching(
        self,
        unit: Literal["tokens", "packed"],
        model: Mapping[str, Any],
        *,
        multiple: int = 1,
        min_saving: float | None = None,
    ) -> Microbatching:
        """Return the microbatch limits: a fixed number of samples, or `microbatch_tokens` counted in ``unit``.

        ``model`` is the policy's ``config.json``; see `Microbatching` for the options.
        """
        fixed = self.microbatch_samples
        return Microbatching(
            unit=unit if fixed == "auto" else "samples",
            size=self.microbatch_tokens if fixed == "auto" else fixed,
            multiple=multiple,
            attention_length=attention_length(model),
            min_saving=min_saving,
        )
