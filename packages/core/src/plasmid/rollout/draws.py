"""Draws of prompts: numbered, remembered until trained on, and repeatable after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..components import PromptStream
from ..types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """One prompt taken from the data, to become one prompt group."""

    id: int
    """Serial number over the whole run; the group's id."""
    prompt: Prompt
    before: Mapping[str, Any]
    """State of the stream before this draw: restoring it and drawing gives the same prompt again."""


class Draws:
    """Numbers the draws of one stream. State and restore are exact, drawn but untrained prompts included."""

    def __init__(self, stream: PromptStream) -> None:
        self._stream = stream
        self._next = 0
        self._again: list[Draw] = []

    def draw(self) -> Draw | None:
        """The next draw: first those that a resume gave back, then new ones; None when the data has ended."""
        if self._again:
            return self._again.pop(0)
        before = self._stream.state()
        prompt = self._stream.draw()
        if prompt is None:
            return None
        draw = Draw(id=self._next, prompt=prompt, before=before)
        self._next += 1
        return draw

    def state(self, pending: list[Draw]) -> dict[str, Any]:
        """Where the data stand, and the draws that were taken but whose groups are not finished."""
        waiting = sorted([*pending, *self._again], key=lambda draw: draw.id)
        return {
            "next": self._next,
            "stream": dict(self._stream.state()),
            "pending": [{"id": draw.id, "before": dict(draw.before)} for draw in waiting],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `CheckpointError` if the data are others than they were."""
        self._again = []
        for item in state["pending"]:
            self._stream.restore(item["before"])
            prompt = self._stream.draw()
            if prompt is not None:
                self._again.append(Draw(id=item["id"], prompt=prompt, before=item["before"]))
        self._stream.restore(state["stream"])
        self._next = int(state["next"])
