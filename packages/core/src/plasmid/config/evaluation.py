"""``[[eval]]``: what one evaluation set is, and when and how it is evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, SerializationInfo, SerializeAsAny, field_serializer

from ..components import DataSource, Reward, Settings, Workflow
from ..settings.trust import INERT
from ..types import SamplingParams

Positive = Annotated[int, Field(ge=1)]


class EvalConfig(Settings):
    """``[[eval]]``: one evaluation set."""

    name: Annotated[str, INERT] = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=200)
    """Name in metrics: ``eval/<name>/reward``."""
    data: SerializeAsAny[DataSource]
    """Its prompts, read once from the beginning."""
    sampling: SamplingParams | None = None
    """Sampling settings; each that is not set is that of the prompt's profile, or else of the run's ``[sampling]``."""
    rewards: tuple[SerializeAsAny[Reward], ...] = ()
    """``[[eval.rewards]]``: what scores its samples; by default the run's ``[[rewards]]``."""
    workflow: SerializeAsAny[Workflow] | None = None
    """How one of its prompts becomes samples; by default the run's ``[workflow]``."""
    samples_per_prompt: int = Field(1, ge=1)
    """Rollouts of each prompt."""
    pass_at: tuple[int, ...] = ()
    """Values of k for pass@k, at most `samples_per_prompt`."""
    pass_threshold: float = 1.0
    """A sample passes if its reward reaches this."""
    by: Annotated[str, INERT] = ""
    """Column of the rows, for example ``difficulty``: results are also given for each of its values; empty for none."""
    weight: float = Field(1.0, ge=0.0)
    """Weight of the set in the mean over all sets, ``eval/mean/...``; 0 leaves it out."""
    limit: Literal["all"] | Positive = "all"
    """Prompts to use."""
    every: int = Field(0, ge=0)
    """Batches between two evaluations; 0 for none during the run."""
    at_start: bool = True
    """Evaluate before the first batch."""
    at_end: bool = True
    """Evaluate after the last batch."""
    mode: Literal["block", "floating", "engine"] = "block"
    """``block``: training waits, one policy version answers all prompts. ``floating``: beside training on the same
    engine, every sample by the version of its moment. ``engine``: beside training on an engine of its own, which gets
    the weights of the batch (`placement.eval_ranks`)."""
    concurrency: Literal["auto"] | Positive = "auto"
    """Rollouts at one time; ``auto`` is as many as training has, or a quarter of that with mode = "floating". Since
    `run.rollout_timeout_s` includes the time that a rollout waits for the engine, what training can do in time an
    evaluation can as well, however many prompts it has."""

    @field_serializer("sampling")
    def _only_explicit(self, value: SamplingParams | None, info: SerializationInfo) -> dict[str, Any] | None:
        """What is inherited must still be so after a round trip through plain data."""
        return None if value is None else value.model_dump(mode=info.mode, exclude_unset=True)

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for k in self.pass_at:
            if not 1 <= k <= self.samples_per_prompt:
                yield f"pass_at: k must be in 1..{self.samples_per_prompt} (samples_per_prompt), got {k}"
        if not self.pass_at and self._is_set("pass_threshold"):
            yield f"pass_threshold = {self.pass_threshold:g} is never read without pass_at; remove it, or set pass_at"
