"""Questions whose answers stand in a corpus."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from plasmid.components.interaction import Environment, Episode, Step
from plasmid.settings.trust import INERT
from plasmid.types import Prompt
from pydantic import Field, field_validator

from ..tools.builtin.corpus import open_corpus
from ..tools.builtin.search import format_hits, is_file
from .answers import command, is_right


class Search(Environment):
    """Answers ``search: words`` with documents; ``answer: text`` ends the episode, with reward 1 for the target."""

    kind: Literal["search"] = "search"
    corpus: Annotated[str, INERT]
    """File of documents: ``.jsonl`` with ``text`` (and ``title``), or text in paragraphs."""
    limit: int = Field(3, ge=1)
    """Documents to show."""

    _is_file = field_validator("corpus")(is_file)

    async def open(self, context: Any) -> None:
        open_corpus(self.corpus)

    def episode(self) -> Episode:
        return SearchEpisode(self)


class SearchEpisode:
    """One question."""

    def __init__(self, settings: Search) -> None:
        self._settings = settings
        self._searches = 0

    def reset(self, seed: int, prompt: Prompt) -> str:
        self._prompt = prompt
        return ""

    def step(self, action: str) -> Step:
        word, rest = command(action, ("search", "answer"))
        if word == "answer":
            right = float(is_right(self._prompt, rest))
            return Step(reward=right, done=True, info={"answer": rest[:200], "searches": self._searches})
        if word == "search":
            self._searches += 1
            return Step(
                observation=format_hits(open_corpus(self._settings.corpus).search(rest, limit=self._settings.limit))
            )
        return Step(observation="write search: or answer:")

    def close(self) -> None:
        """Nothing is open."""
