"""Mixture: several data sources combined into one stream."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from plasmid.components import DataFacts, DataSource, PromptEncoder, PromptStream, RecipeView
from plasmid.errors import CheckpointError, DataError
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from pydantic import AfterValidator, Field, SerializeAsAny

from .within import relocate_errors, seed_for

MAX_SIMULATED_DRAWS = 100_000
"""Maximum number of draws simulated to find when the first source ends, which takes about a second."""


def _check_names(sources: Mapping[str, DataSource]) -> Mapping[str, DataSource]:
    for name in sources:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ValueError(f"{name!r} is not a valid name of a source; use letters, digits, '_', '.' and '-'")
    return sources


class Mixture(DataSource):
    """Several sources, drawn from at random by their weights."""

    kind: Literal["mixture"] = "mixture"
    sources: Annotated[Mapping[str, SerializeAsAny[DataSource]], AfterValidator(_check_names)] = Field(min_length=1)
    """Sources by name: ``[data.sources.math]`` has the same settings as ``[data]``."""
    weights: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Relative sampling weights of the sources, by name; 1 by default."""
    profiles: Annotated[Mapping[str, str], INERT] = Field(default_factory=dict)
    """Default profiles of the prompts of a source: ``profiles.math = "exact"``. A profile named by a row takes
    precedence."""
    exhausted: Literal["go-on", "end"] = "go-on"
    """Behavior when a source runs out of prompts: ``go-on`` with the other sources until all have ended, or ``end`` the
    data."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for table, names in (("weights", self.weights), ("profiles", self.profiles)):
            for name in names:
                if name not in self.sources:
                    yield f"{table}.{name}: no such source; sources are {', '.join(self.sources)}"
        kinds = {source.holds_demonstrations() for source in self.sources.values()}
        if len(kinds) > 1:
            yield "sources: must all have prompts or all have demonstrations, got both"

    def holds_demonstrations(self) -> bool:
        return any(source.holds_demonstrations() for source in self.sources.values())

    def counts_tokens(self) -> bool:
        return any(source.counts_tokens() for source in self.sources.values())

    def without_targets(self, key: str, profile: str = "") -> Iterator[tuple[str, str]]:
        for name, source in self.sources.items():
            yield from source.without_targets(f"{key}.sources.{name}", self.profiles.get(name, profile))

    def stream(self, encode: PromptEncoder, *, seed: int) -> MixtureStream:
        """Open every source."""
        streams: dict[str, PromptStream] = {}
        for name, source in self.sources.items():
            with relocate_errors(source, f"sources.{name}"):
                # derive seeds from names, so that adding or removing a source does not change the others
                streams[name] = source.stream(encode, seed=seed_for(seed, name))
        return MixtureStream(self, streams, seed=seed)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Iterate over all prompts of all sources, one source after the other."""
        if self.weights:
            raise DataError("data.weights: an evaluation set reads every source once; remove the setting")
        for name, source in self.sources.items():
            with relocate_errors(source, f"sources.{name}"):
                for prompt in source.prompts(encode):
                    yield self.label(name, prompt)

    def label(self, name: str, prompt: Prompt) -> Prompt:
        """Add the name of the source to a prompt."""
        source = f"{name}/{prompt.source}" if prompt.source else name
        profile = prompt.profile or self.profiles.get(name, "")
        return replace(prompt, id=f"{name}/{prompt.id}", source=source, profile=profile)


class MixtureStream(PromptStream):
    """Stream of a mixture. The source of draw n depends only on the seed, n and the sources that have ended."""

    def __init__(self, mixture: Mixture, streams: Mapping[str, PromptStream], *, seed: int) -> None:
        self._mixture, self._streams, self._seed = mixture, dict(streams), seed
        self._drawn = {name: 0 for name in streams}
        self._next = 0
        self._ended: list[str] = []

    def draw(self) -> Prompt | None:
        """Return the next prompt, or None if all sources have ended (any source, with ``exhausted = "end"``)."""
        while len(self._ended) < len(self._streams) and not (self._ended and self._mixture.exhausted == "end"):
            name = self._pick(self._next, self._ended)
            with self._relocate(name):
                prompt = self._streams[name].draw()
            self._next += 1
            if prompt is not None:
                self._drawn[name] += 1
                return self._mixture.label(name, prompt)
            self._ended.append(name)
        return None

    def _pick(self, number: int, ended: Sequence[str]) -> str:
        """Choose the source of a draw."""
        names = [name for name in self._streams if name not in ended]
        weights = np.cumsum([self._mixture.weights.get(name, 1.0) for name in names])
        at = np.random.default_rng([self._seed, number]).random() * weights[-1]
        return names[min(int(np.searchsorted(weights, at, side="right")), len(names) - 1)]

    def prompt(self, id: str) -> Prompt:
        """Return the prompt with this id from the source that the id names."""
        name, _, rest = id.partition("/")
        with self._relocate(name):
            return self._mixture.label(name, self._streams[name].prompt(rest))

    def learn(self, prompt: Prompt, rewards: Sequence[float]) -> None:
        """Forward the rewards to the source of the prompt."""
        name, _, rest = prompt.id.partition("/")
        source = prompt.source.partition("/")[2]
        self._streams[name].learn(replace(prompt, id=rest, source=source), rewards)

    def _relocate(self, name: str) -> AbstractContextManager[None]:
        return relocate_errors(self._mixture.sources[name], f"sources.{name}")

    def state(self) -> Mapping[str, Any]:
        """Return the states of the sources and of the draws."""
        return {
            "next": self._next,
            "drawn": dict(self._drawn),
            "ended": list(self._ended),
            "sources": {name: dict(stream.state()) for name, stream in self._streams.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the sources or their data have changed."""
        if set(state["sources"]) != set(self._streams):
            then, now = (", ".join(sorted(names)) for names in (state["sources"], self._streams))
            raise CheckpointError(f"data.sources: must be the sources of the checkpoint, {then}, got {now}")
        for name, stream in self._streams.items():
            with self._relocate(name):
                stream.restore(state["sources"][name])
        self._next, self._ended = int(state["next"]), list(state["ended"])
        self._drawn = {name: int(count) for name, count in state["drawn"].items()}

    def metrics(self) -> Mapping[str, float]:
        """Return the number of draws and the metrics of each source."""
        metrics: dict[str, float] = {}
        for name, stream in self._streams.items():
            metrics[f"data/{name}/drawn"] = float(self._drawn[name])
            for key, value in stream.metrics().items():
                metrics[f"data/{name}/{key.removeprefix('data/')}"] = value
        return metrics

    def facts(self) -> DataFacts:
        """Return the sums over all sources, and the facts of each."""
        parts = {name: stream.facts() for name, stream in self._streams.items()}
        counts = [facts.num_prompts for facts in parts.values() if facts.num_prompts is not None]
        profiles = {profile: f"data.profiles.{name}" for name, profile in self._mixture.profiles.items()}
        for facts in parts.values():
            profiles = {**facts.profiles, **profiles}
        return DataFacts(
            num_prompts=sum(counts) if len(counts) == len(parts) else None,
            num_draws=self._num_draws({name: facts.num_draws for name, facts in parts.items()}),
            left_out=sum(facts.left_out for facts in parts.values()),
            profiles=profiles,
            parts=parts,
        )

    def _num_draws(self, each: Mapping[str, int | None]) -> int | None:
        """Compute the number of draws until the data ends, from the facts of the sources."""
        known = {name: count for name, count in each.items() if count is not None}
        if self._mixture.exhausted == "go-on":
            return sum(known.values()) if len(known) == len(each) else None
        drawn = Counter[str]()
        for number in range(MAX_SIMULATED_DRAWS if known else 0):
            name = self._pick(number, [])
            if drawn[name] == known.get(name):
                return number
            drawn[name] += 1
        return None

    def close(self) -> None:
        """Close every source."""
        for stream in self._streams.values():
            stream.close()
