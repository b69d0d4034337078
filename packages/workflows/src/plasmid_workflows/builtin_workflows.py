"""Workflows that come with Plasmid: one completion per rollout, or a Python function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from plasmid.components import RecipeView, Rollout, Workflow
from plasmid.types import Prompt, Sample
from pydantic import Field

from .execution import RolloutFailed
from .tools.signatures import import_function


class SingleTurn(Workflow):
    """One completion per prompt."""

    kind: Literal["single-turn"] = "single-turn"

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        completion = await rollout.generate(prompt.token_ids)
        return [rollout.sample(prompt, [completion])]


class FunctionWorkflow(Workflow):
    """An async function that receives a rollout and a prompt and returns one or more samples.

    ``async def play(rollout, prompt, **settings)``; see `plasmid.Rollout` for the methods of a rollout. Several samples
    of one rollout count once in the loss.
    """

    kind: Literal["function"] = "function"
    function: str
    """``module:function`` or ``file.py:function``."""
    settings: Mapping[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of the function."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        function = import_function(self.function)
        if not inspect.iscoroutinefunction(function):
            yield f"function: {self.function} must be async: `async def {function.__name__}(rollout, prompt)`"
        try:
            inspect.signature(function).bind(None, None, **self.settings)
        except TypeError as error:
            yield f"settings: {self.function} is called with (rollout, prompt) and {sorted(self.settings)}: {error}"

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        made = await import_function(self.function)(rollout, prompt, **self.settings)
        samples = [made] if isinstance(made, Sample) else made
        if not isinstance(samples, list | tuple) or not all(isinstance(sample, Sample) for sample in samples):
            raise RolloutFailed(f"{self.function} must return a Sample or a list of them, got {made!r:.200}")
        return list(samples)
