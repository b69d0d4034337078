"""Does the text have its parts in tags?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from plasmid import Prompt, Reward, Sample
from plasmid.settings.trust import INERT
from pydantic import Field


class Format(Reward):
    """1.0 if each tag occurs once, closed, not empty, and they come in their order, else 0.0."""

    kind: Literal["format"] = "format"
    tags: Annotated[tuple[str, ...], INERT] = Field(("answer",), min_length=1)
    """Names in their order: ``["think", "answer"]`` asks for ``<think>...</think> ... <answer>...</answer>``."""
    text_around: bool = True
    """Allow other text before, between and after the tags."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for tag in self.tags:
            if not tag or set(tag) & set("<>/ \n") or self.tags.count(tag) > 1:
                yield f"tags must be distinct names without <, >, / and white space, got {tag!r}"

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        return float(self._fits(sample.text))

    def _fits(self, text: str) -> bool:
        position = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            start, end = text.find(opening, position), text.find(closing, position)
            if start < 0 or end < start or not text[start + len(opening) : end].strip():
                return False
            if not self.text_around and text[position:start].strip():
                return False
            position = end + len(closing)
        return self.text_around or not text[position:].strip()
