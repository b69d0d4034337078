"""What rewards, filters and workflows remember, in checkpoints: each worker process saves and takes up its own part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..components import Component, Reward
from ..config import RunConfig
from ..errors import CheckpointError, one_line
from ..json_files import read_json


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Place:
    """A component that worker processes hold."""

    name: str
    """The same in every run of a recipe."""
    component: Component
    eval_set: str = ""
    """The evaluation set that it belongs to; empty for training's."""


def places(config: RunConfig) -> Iterator[Place]:
    """Every component that worker processes hold."""
    yield Place(name="workflow", component=config.workflow)
    for name, profile in config.profiles.items():
        if profile.workflow is not None:
            yield Place(name=f"profiles.{name}.workflow", component=profile.workflow)
    for index, reward in enumerate(config.rewards):
        yield Place(name=f"rewards.{index}", component=reward)
    for index, filter_ in enumerate(config.filters):
        yield Place(name=f"filters.{index}", component=filter_)
    for set_ in config.eval:
        if set_.workflow is not None:
            yield Place(name=f"eval.{set_.name}.workflow", component=set_.workflow, eval_set=set_.name)
        for index, reward in enumerate(set_.rewards or ()):
            yield Place(name=f"eval.{set_.name}.rewards.{index}", component=reward, eval_set=set_.name)


def remembers(config: RunConfig) -> bool:
    """True if any of them may have a state."""
    return any(type(place.component).state is not Component.state for place in places(config))


class Memory:
    """The states of one worker's components: as they are, as they were at a `mark`, and as files."""

    def __init__(self, config: RunConfig, on_rewards: Callable[[str, Callable[[], Any]], Any]) -> None:
        """``on_rewards`` awaits a function on the thread of an evaluation set's rewards, or of training's ('')."""
        self._places = list(places(config))
        self._on_rewards = on_rewards
        self._marked = "{}"

    async def mark(self) -> None:
        """Remember the states as they are now, for `save`. Raises `CheckpointError` if one is not plain JSON."""
        states: dict[str, Any] = {}
        for place in self._places:
            state = dict(await self._call(place, place.component.state))
            if state:
                states[place.name] = _plain(place, state)
        self._marked = json.dumps(states)

    async def save(self, path: Path) -> None:
        """Write the states as they were at the last `mark`."""
        await asyncio.to_thread(path.write_text, self._marked, encoding="utf-8")

    async def restore(self, paths: Sequence[Path]) -> None:
        """Take up what one or several processes had saved. Raises `CheckpointError`."""
        try:
            saved: list[Mapping[str, Any]] = [read_json(path) for path in paths]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{paths[0].parent}: cannot be read: {one_line(error)}") from error
        for place in self._places:
            states = [found[place.name] for found in saved if place.name in found]
            if states:
                await self._call(place, partial(_restore, place, states))

    async def _call(self, place: Place, function: Callable[[], Any]) -> Any:
        if isinstance(place.component, Reward):
            return await self._on_rewards(place.eval_set, function)
        return function()


def _plain(place: Place, state: Mapping[str, Any]) -> Any:
    try:
        plain = json.loads(json.dumps(state, allow_nan=True))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{place.name}: its state must hold JSON types only: {one_line(error)}") from error
    return plain


def _restore(place: Place, states: Sequence[Mapping[str, Any]]) -> None:
    component = place.component
    try:
        component.restore(states[0] if len(states) == 1 else component.merge(states))
    except Exception as error:  # boundary: components are users' code
        raise CheckpointError(f"{place.name}: cannot take up its state: {one_line(error)}") from error
