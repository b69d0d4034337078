"""Draws of prompts: numbered, remembered until trained on, and repeatable after a resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plasmid.components import PromptStream
from plasmid.types import Prompt
from plasmid.types.batch import GroupRef


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """One prompt taken from the data, to become one prompt group."""

    id: int
    """Serial number over the whole run; the group's id."""
    prompt: Prompt


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
        prompt = self._stream.draw()
        if prompt is None:
            return None
        draw = Draw(id=self._next, prompt=prompt)
        self._next += 1
        return draw

    def again(self, group: GroupRef) -> Draw:
        """The draw of a group, to be rolled out once more."""
        return Draw(id=group.id, prompt=self._stream.prompt(group.prompt_id))

    def finished(self, draw: Draw, group: GroupRef) -> None:
        """Tell the data what became of a draw. Call it once, when its group has been scored."""
        if group.num_samples:
            self._stream.learn(draw.prompt, group.rewards.tolist())

    def state(self, pending: list[Draw]) -> dict[str, Any]:
        """Where the data stand, and the draws that were taken but whose groups are not finished."""
        waiting = sorted([*pending, *self._again], key=lambda draw: draw.id)
        return {
            "next": self._next,
            "stream": dict(self._stream.state()),
            "pending": [{"id": draw.id, "prompt": draw.prompt.id} for draw in waiting],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `CheckpointError` if the data are others than they were."""
        self._stream.restore(state["stream"])
        self._again = [Draw(id=item["id"], prompt=self._stream.prompt(item["prompt"])) for item in state["pending"]]
        self._next = int(state["next"])
