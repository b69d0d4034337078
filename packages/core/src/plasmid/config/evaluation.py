"""``[[eval]]``: an evaluation set, and when and how to evaluate it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializationInfo, SerializeAsAny, field_serializer

from ..components import DataSource, RecipeView, Reward, Settings, Workflow
from ..settings.trust import INERT
from ..types import SamplingParams
from .loop import Positive

if TYPE_CHECKING:
    from .run import RunConfig


class EvalConfig(Settings):
    """``[[eval]]``: one evaluation set."""

    name: Annotated[str, INERT] = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=200)
    """Name of the set in metrics: ``eval/<name>/reward``."""
    data: SerializeAsAny[DataSource]
    """Source of the prompts; each evaluation uses the same ones, from the first."""
    sampling: SamplingParams | None = None
    """Sampling settings; unset ones are taken from the prompt's profile, and otherwise from ``[sampling]``."""
    rewards: tuple[SerializeAsAny[Reward], ...] = ()
    """Rewards that score the samples (``[[eval.rewards]]``); by default the run's ``[[rewards]]``."""
    workflow: SerializeAsAny[Workflow] | None = None
    """Workflow that turns each prompt into samples; by default the run's ``[workflow]``."""
    samples_per_prompt: int = Field(1, ge=1)
    """Number of rollouts per prompt."""
    pass_at: tuple[int, ...] = ()
    """Values of k to report pass@k for, each at most `samples_per_prompt`; empty reports none."""
    pass_threshold: float = 1.0
    """Minimum reward of a rollout that counts as passed."""
    by: Annotated[str, INERT] = ""
    """Column to break results down by, for example ``difficulty``; empty reports only the whole set."""
    weight: float = Field(1.0, ge=0.0)
    """Weight of the set in the mean over all sets (``eval/mean/...``); 0 excludes it."""
    limit: Literal["all"] | Positive = "all"
    """Number of prompts to use, or ``all``."""
    every: int = Field(0, ge=0)
    """Evaluation interval, in batches; 0 evaluates only at the start and the end."""
    at_start: bool = True
    """Evaluate before the first batch."""
    at_end: bool = True
    """Evaluate after the last batch."""
    mode: Literal["block", "floating", "engine"] = "block"
    """Scheduling. ``block`` pauses training and samples all prompts from one policy version. ``floating`` runs
    concurrently with training on the same engine, so policy versions may differ between samples. ``engine`` runs
    concurrently on a separate engine (`placement.eval_ranks`), which loads the weights of the evaluated batch."""
    concurrency: Literal["auto"] | Positive = "auto"
    """Maximum number of concurrent rollouts; ``auto`` is the same number as in training, or a quarter of it with
    mode = "floating". More rollouts wait longer for the engine, which counts toward `run.rollout_timeout_s`."""

    @field_serializer("sampling")
    def _only_explicit(self, value: SamplingParams | None, info: SerializationInfo) -> dict[str, Any] | None:
        """Serialize only explicit settings, so that the others are still inherited after a round trip."""
        return None if value is None else value.model_dump(mode=info.mode, exclude_unset=True)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for k in self.pass_at:
            if not 1 <= k <= self.samples_per_prompt:
                yield f"pass_at: k must be in 1..{self.samples_per_prompt} (samples_per_prompt), got {k}"
        if not self.pass_at and self._is_set("pass_threshold"):
            yield f"pass_threshold = {self.pass_threshold:g} has no effect without pass_at; remove it, or set pass_at"


def find_name_errors(sets: Sequence[EvalConfig]) -> Iterator[str]:
    """Yield an error for each duplicate or reserved name of an evaluation set."""
    names = [set_.name for set_ in sets]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"eval: {names.count(name)} sets are named {name!r}; names must be unique"
    if "mean" in names:
        yield f"eval.{names.index('mean')}.name: 'mean' is reserved for the mean over all sets; choose another"


def find_mode_errors(config: RunConfig) -> Iterator[str]:
    """Yield an error for each evaluation mode that conflicts with other settings of the recipe."""
    modes = [set_.mode for set_ in config.eval]
    for index, mode in enumerate(modes):
        if mode == "floating" and config.run.max_staleness == 0:
            yield (
                f'eval.{index}.mode: "floating" evaluates concurrently with training and needs '
                'run.max_staleness of at least 1; raise it, or set mode to "block" or "engine"'
            )
        if mode == "engine" and config.placement.eval_ranks == 0:
            yield f'eval.{index}.mode: "engine" needs a separate engine; set placement.eval_ranks, for example to 1'
    if config.placement.eval_ranks and "engine" not in modes:
        yield (
            f"placement.eval_ranks: {config.placement.eval_ranks} has no effect, since no evaluation set has "
            'mode = "engine"; remove it'
        )
