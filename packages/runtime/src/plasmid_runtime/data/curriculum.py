"""Prompts that the policy solves now and then are drawn more often than those that it always or never solves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from plasmid.components import DataFacts, DataSource, PromptEncoder, PromptStream
from plasmid.errors import DataError
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from pydantic import Field, SerializeAsAny

from .within import located, seed_for


class Curriculum(DataSource):
    """Passes over prompts of a source whose observed pass rate is far from a target.

    A prompt is drawn with the chance max(floor, 1 - |rate - target| / max(target, 1 - target)), one that was never
    observed always.
    """

    kind: Literal["curriculum"] = "curriculum"
    source: SerializeAsAny[DataSource]
    """Where the prompts come from: ``[data.source]`` is a table as ``[data]`` would be."""
    by: Annotated[str, INERT] = "none"
    """Column whose values share a pass rate, such as a level; ``none`` observes each prompt by itself, which takes
    prompts that come again."""
    target: float = Field(0.5, ge=0.0, le=1.0)
    """The pass rate that is liked best."""
    floor: float = Field(0.1, ge=0.01, le=1.0)
    """Smallest chance of a prompt, so that none is forgotten."""
    keep: float = Field(0.5, ge=0.0, lt=1.0)
    """Share of the old rate when a new one is observed; 0 knows the last rollouts only."""
    pass_threshold: float = 1.0
    """A sample passes if its reward reaches this."""

    def holds_demonstrations(self) -> bool:
        return self.source.holds_demonstrations()

    def counts_tokens(self) -> bool:
        return self.source.counts_tokens()

    def without_targets(self, place: str, profile: str = "") -> Iterator[tuple[str, str]]:
        yield from self.source.without_targets(f"{place}.source", profile)

    def stream(self, encode: PromptEncoder, *, seed: int) -> CurriculumStream:
        """Open the source. Raises `DataError` if pass rates could never be used."""
        if self.holds_demonstrations():
            raise DataError("data.source.kind: demonstrations are not sampled, so there is no pass rate; leave it out")
        with located(self.source, "source"):
            stream = self.source.stream(encode, seed=seed_for(seed, "source"))
        if self.by == "none" and stream.facts().num_prompts is None:
            raise DataError(
                "data.by: the source makes prompts that never come again; name a column whose values share a pass rate"
            )
        return CurriculumStream(self, stream, seed=seed)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Evaluation sets have no order to choose."""
        raise DataError("data.kind: an evaluation set is read once, in order; use the source of the curriculum itself")


class CurriculumStream(PromptStream):
    """What is drawn depends on the source, the seed, and on what `learn` was told before."""

    def __init__(self, curriculum: Curriculum, stream: PromptStream, *, seed: int) -> None:
        self._settings, self._stream, self._seed = curriculum, stream, seed
        self._rates: dict[str, float] = {}
        self._offered = 0
        self._skipped = 0

    def draw(self) -> Prompt | None:
        """The next prompt of the source that is not passed over."""
        while True:
            with located(self._settings.source, "source"):
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
        """The prompt of an id."""
        with located(self._settings.source, "source"):
            return self._stream.prompt(id)

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Observe the share of samples that pass."""
        key, keep = self._key(prompt), self._settings.keep
        seen = float(np.mean(np.asarray(rewards) >= self._settings.pass_threshold))
        self._rates[key] = keep * self._rates[key] + (1.0 - keep) * seen if key in self._rates else seen
        self._stream.learn(prompt, rewards)

    def state(self) -> Mapping[str, Any]:
        """The observed pass rates, and where the source stands."""
        return {
            "offered": self._offered,
            "skipped": self._skipped,
            "rates": dict(self._rates),
            "source": dict(self._stream.state()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the data are others than they were."""
        with located(self._settings.source, "source"):
            self._stream.restore(state["source"])
        self._offered, self._skipped = int(state["offered"]), int(state["skipped"])
        self._rates = {key: float(rate) for key, rate in state["rates"].items()}

    def metrics(self) -> Mapping[str, float]:
        """How many pass rates are known, their mean, and the share of prompts passed over."""
        metrics = {**self._stream.metrics(), "data/known": float(len(self._rates))}
        if self._rates:
            metrics["data/pass_rate"] = float(np.mean(list(self._rates.values())))
        if self._offered:
            metrics["data/passed_over"] = self._skipped / self._offered
        return metrics

    def facts(self) -> DataFacts:
        """Those of the source."""
        return self._stream.facts()

    def close(self) -> None:
        """Close the source."""
        self._stream.close()
