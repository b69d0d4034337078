"""Curriculum: draw prompts with an intermediate pass rate more often than those that are always or never solved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from plasmid.components import DataFacts, DataSource, PromptEncoder, PromptStream
from plasmid.errors import DataError
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from pydantic import Field, SerializeAsAny

from .within import relocate_errors, seed_for


class Curriculum(DataSource):
    """Skips prompts of a source whose observed pass rate is far from a target.

    A prompt is drawn with probability max(floor, 1 - |rate - target| / max(target, 1 - target)), or 1 if its pass rate
    is unknown.
    """

    kind: Literal["curriculum"] = "curriculum"
    source: SerializeAsAny[DataSource]
    """Source of the prompts: ``[data.source]`` has the same settings as ``[data]``."""
    by: Annotated[str, INERT] = "none"
    """Column, such as a difficulty level, whose values share a pass rate. ``none`` tracks each prompt individually,
    which requires a source that repeats its prompts."""
    target: float = Field(0.5, ge=0.0, le=1.0)
    """Preferred pass rate."""
    floor: float = Field(0.1, ge=0.01, le=1.0)
    """Minimum probability of drawing a prompt."""
    keep: float = Field(0.5, ge=0.0, lt=1.0)
    """Decay of the moving average of the pass rate: weight of the old value; 0 uses only the latest rollouts."""
    pass_threshold: float = 1.0
    """Minimum reward of a sample that counts as passed."""

    def holds_demonstrations(self) -> bool:
        return self.source.holds_demonstrations()

    def counts_tokens(self) -> bool:
        return self.source.counts_tokens()

    def without_targets(self, key: str, profile: str = "") -> Iterator[tuple[str, str]]:
        yield from self.source.without_targets(f"{key}.source", profile)

    def stream(self, encode: PromptEncoder, *, seed: int) -> CurriculumStream:
        """Open the source. Raises `DataError` if it does not support pass rates."""
        if self.holds_demonstrations():
            raise DataError(
                "data.source.kind: demonstrations are not sampled and have no pass rate; use another source"
            )
        with relocate_errors(self.source, "source"):
            stream = self.source.stream(encode, seed=seed_for(seed, "source"))
        if self.by == "none" and stream.facts().num_prompts is None:
            raise DataError("data.by: the source never repeats a prompt; set a column whose values share a pass rate")
        return CurriculumStream(self, stream, seed=seed)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Raise `DataError`: evaluation sets have no curriculum."""
        raise DataError("data.kind: an evaluation set cannot be a curriculum; use its source")


class CurriculumStream(PromptStream):
    """Stream of a curriculum. Draws depend on the source, the seed, and the rewards passed to `learn`."""

    def __init__(self, curriculum: Curriculum, stream: PromptStream, *, seed: int) -> None:
        self._settings, self._stream, self._seed = curriculum, stream, seed
        self._rates: dict[str, float] = {}
        self._offered = 0
        self._skipped = 0

    def draw(self) -> Prompt | None:
        """Return the next prompt of the source that is not skipped."""
        while True:
            with relocate_errors(self._settings.source, "source"):
                prompt = self._stream.draw()
            if prompt is None:
                return None
            number, self._offered = self._offered, self._offered + 1
            rate = self._rates.get(self._key(prompt))
            if rate is None or np.random.default_rng([self._seed, number]).random() < self._chance(rate):
                return prompt
            self._skipped += 1

    def _chance(self, rate: float) -> float:
        target = self._settings.target
        return max(self._settings.floor, 1.0 - abs(rate - target) / max(target, 1.0 - target))

    def _key(self, prompt: Prompt) -> str:
        if self._settings.by == "none":
            return prompt.id
        if self._settings.by not in prompt.metadata:
            has = ", ".join(prompt.metadata) or "nothing"
            raise DataError(
                f"{prompt.id}: no key {self._settings.by!r}; besides prompt and target the row has: {has}; set data.by"
            )
        return str(prompt.metadata[self._settings.by])

    def prompt(self, id: str) -> Prompt:
        """Return the prompt with this id."""
        with relocate_errors(self._settings.source, "source"):
            return self._stream.prompt(id)

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Update the pass rate with the fraction of samples that passed."""
        key, keep = self._key(prompt), self._settings.keep
        seen = float(np.mean(np.asarray(rewards) >= self._settings.pass_threshold))
        self._rates[key] = keep * self._rates[key] + (1.0 - keep) * seen if key in self._rates else seen
        self._stream.learn(prompt, rewards)

    def state(self) -> Mapping[str, Any]:
        """Return the observed pass rates and the state of the source."""
        return {
            "offered": self._offered,
            "skipped": self._skipped,
            "rates": dict(self._rates),
            "source": dict(self._stream.state()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the data has changed."""
        with relocate_errors(self._settings.source, "source"):
            self._stream.restore(state["source"])
        self._offered, self._skipped = int(state["offered"]), int(state["skipped"])
        self._rates = {key: float(rate) for key, rate in state["rates"].items()}

    def metrics(self) -> Mapping[str, float]:
        """Return the number of known pass rates, their mean, and the fraction of skipped prompts."""
        metrics = {**self._stream.metrics(), "data/known": float(len(self._rates))}
        if self._rates:
            metrics["data/pass_rate"] = float(np.mean(list(self._rates.values())))
        if self._offered:
            metrics["data/passed_over"] = self._skipped / self._offered
        return metrics

    def facts(self) -> DataFacts:
        """Return the facts of the source."""
        return self._stream.facts()

    def close(self) -> None:
        """Close the source."""
        self._stream.close()
