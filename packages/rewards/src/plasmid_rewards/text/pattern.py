"""Does the text have a given form, as a regular expression says?"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import regex
from plasmid import Prompt, Reward, Sample, Score
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator


class Regex(Reward):
    """1.0 if the pattern matches, else 0.0, also if matching takes too long."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, INERT]
    """Regular expression, as the ``regex`` package reads it; a dot matches line ends, too."""
    where: Literal["whole", "anywhere"] = "anywhere"
    """What must match: the whole text, or some part of it."""
    match_timeout_s: float = Field(1.0, gt=0, le=60)
    """Give up on a text after this long: some patterns take exponential time on texts that a policy can find."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            regex.compile(value, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
        return value

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        pattern = regex.compile(self.pattern, regex.DOTALL)
        match = pattern.fullmatch if self.where == "whole" else pattern.search
        try:
            # concurrent: other threads go on meanwhile
            found = await asyncio.to_thread(match, sample.text, timeout=self.match_timeout_s, concurrent=True)
            return Score(value=float(found is not None))
        except TimeoutError:
            return Score(value=0.0, error=f"no match found within match_timeout_s = {self.match_timeout_s:g}")
