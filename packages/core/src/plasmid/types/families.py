"""Properties of model families, which plugins register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The models with one ``model_type`` in their ``config.json``. Several plugins may each register a part of it."""

    model_type: str
    layouts: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """By kind of trainer: a function that returns the family's names of weights and layers in the form of that trainer.
    Called in the trainer's processes only, so it may import torch."""
    tool_calls: str | Callable[[str], Any] = ""
    """Format in which the models write tool calls, by name, or a parser that returns what built-in parsers return."""
    reasoning: str = ""
    """Format of the models' reasoning, a value of ``workflow.reasoning``."""

    def merge(self, other: ModelFamily) -> ModelFamily:
        """Combine the properties of both. Raises ValueError if they disagree."""
        for kind in self.layouts:
            if kind in other.layouts:
                raise ValueError(f"layouts of trainer {kind!r}")
        known: dict[str, Any] = {"layouts": {**self.layouts, **other.layouts}}
        for part in (part.name for part in fields(self) if part.name not in ("model_type", "layouts")):
            ours, theirs = getattr(self, part), getattr(other, part)
            if ours and theirs and ours != theirs:
                raise ValueError(part)
            known[part] = ours or theirs
        return replace(self, **known)
