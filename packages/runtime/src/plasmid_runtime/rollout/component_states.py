"""Checkpointed state of rewards, filters and workflows. Each worker process saves and restores its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plasmid.components import Component, Reward
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError, one_line
from plasmid.utils.json_text import read_json


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerComponent:
    """A component that lives in worker processes."""

    name: str
    """Name that is stable across runs of a recipe."""
    component: Component
    eval_set: str = ""
    """Evaluation set that the component belongs to; empty for training."""


def iterate_worker_components(config: RunConfig) -> Iterator[WorkerComponent]:
    """Yield all components that live in worker processes."""
    yield WorkerComponent(name="workflow", component=config.workflow)
    for name, profile in config.profiles.items():
        if profile.workflow is not None:
            yield WorkerComponent(name=f"profiles.{name}.workflow", component=profile.workflow)
    for index, reward in enumerate(config.rewards):
        yield WorkerComponent(name=f"rewards.{index}", component=reward)
    for index, filter_ in enumerate(config.filters):
        yield WorkerComponent(name=f"filters.{index}", component=filter_)
    for set_ in config.eval:
        if set_.workflow is not None:
            yield WorkerComponent(name=f"eval.{set_.name}.workflow", component=set_.workflow, eval_set=set_.name)
        for index, reward in enumerate(set_.rewards or ()):
            yield WorkerComponent(name=f"eval.{set_.name}.rewards.{index}", component=reward, eval_set=set_.name)


def has_states(config: RunConfig) -> bool:
    """Return True if any worker component may have state."""
    return any(
        type(component.component).state is not Component.state for component in iterate_worker_components(config)
    )


class ComponentStates:
    """State of one worker's components, captured by `mark` and written by `save`."""

    def __init__(self, config: RunConfig, on_rewards: Callable[[str, Callable[[], Any]], Any]) -> None:
        """``on_rewards`` runs a function on the reward thread of an evaluation set, or of training ('')."""
        self._components = list(iterate_worker_components(config))
        self._on_rewards = on_rewards
        self._marked = "{}"

    async def mark(self) -> None:
        """Capture the current states for `save`. Raises `CheckpointError` if a state is not plain JSON."""
        states: dict[str, Any] = {}
        for component in self._components:
            state = copy_state(component.name, await self._call(component, component.component.state))
            if state:
                states[component.name] = state
        self._marked = json.dumps(states)

    async def save(self, path: Path) -> None:
        """Write the states captured by the last `mark`."""
        await asyncio.to_thread(path.write_text, self._marked, encoding="utf-8")

    async def restore(self, paths: Sequence[Path]) -> None:
        """Restore the states saved by one or several processes. Raises `CheckpointError`."""
        try:
            saved: list[Mapping[str, Any]] = [read_json(path) for path in paths]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{paths[0].parent}: cannot be read: {one_line(error)}") from error
        for component in self._components:
            states = [found[component.name] for found in saved if component.name in found]
            if states:
                await self._call(component, partial(restore_component, component.name, component.component, states))

    async def _call(self, component: WorkerComponent, function: Callable[[], Any]) -> Any:
        if isinstance(component.component, Reward):
            return await self._on_rewards(component.eval_set, function)
        return function()


def copy_state(name: str, state: object) -> dict[str, Any]:
    """Return a deep copy of the state of the component ``name``. Raises `CheckpointError` if it is not plain JSON."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{name}: its state must be a mapping, got {state!r:.100}")
    try:
        return dict(json.loads(json.dumps(dict(state), allow_nan=True)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name}: its state must have only JSON types: {one_line(error)}") from error


def restore_component(name: str, component: Component, states: Sequence[Mapping[str, Any]]) -> None:
    """Restore the component ``name`` from the states of one or several processes. Raises `CheckpointError`."""
    try:
        component.restore(states[0] if len(states) == 1 else component.merge(states))
    except Exception as error:  # boundary: components are users' code
        raise CheckpointError(f"{name}: cannot restore its state: {one_line(error)}") from error
