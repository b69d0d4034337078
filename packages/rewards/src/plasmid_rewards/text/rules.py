"""Rewards by rules on a text: its match with the target, form, length and words."""

from __future__ import annotations

import asyncio
import hashlib
import re
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

import regex
from plasmid import Prompt, RecipeView, Reward, Sample, Score
from plasmid.settings.trust import INERT
from pydantic import Field, field_validator

from ..targets import read_targets


class ExactMatch(Reward):
    """1.0 if the text equals the target (or one of a list of targets), else 0.0."""

    kind: Literal["exact-match"] = "exact-match"
    reads_target: ClassVar[bool] = True
    where: Literal["whole", "start", "end", "anywhere"] = "whole"
    """Where the target must occur in the text. With ``whole``, the text must consist of the target only."""
    strip: bool = True
    """Ignore white space around text and target."""
    ignore_case: bool = False
    """Ignore case."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        text = self._plain(sample.text)
        return float(any(self._matches(text, self._plain(str(target))) for target in read_targets(prompt, self.kind)))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text

    def _matches(self, text: str, target: str) -> bool:
        if self.where == "whole" or not target:  # every text contains an empty target, so any would be rewarded
            return text == target
        if self.where == "start":
            return text.startswith(target)
        return text.endswith(target) if self.where == "end" else target in text


ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
EXACT_ANSWERS = {"yes", "no", "noanswer"}


class F1(Reward):
    """Harmonic mean of word precision and recall, the best over a list of targets; 0.0 if no word is shared.

    The measure of SQuAD (Rajpurkar et al. 2016): case, punctuation, articles and spacing are ignored. If the text or
    the target is ``yes``, ``no`` or ``noanswer``, only equality counts.
    """

    kind: Literal["f1"] = "f1"
    reads_target: ClassVar[bool] = True
    after: Annotated[str, INERT] = ""
    """Compare only the text after the last occurrence of this string, for example ``</think>``; texts without it get
    0.0."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        targets = [normalize(str(target)) for target in read_targets(prompt, self.kind)]
        text = sample.text
        if self.after:
            _, found, text = text.rpartition(self.after)
            if not found:
                return Score(value=0.0, error=f"no {self.after!r} in the text")
        words = normalize(text)
        best = max((_f1(words, target) for target in targets), key=lambda parts: parts[0])
        return Score(value=best[0], components={"precision": best[1], "recall": best[2]})


def normalize(text: str) -> str:
    """Lowercase the text, remove punctuation and articles, and separate words by single spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _f1(text: str, target: str) -> tuple[float, float, float]:
    if text == target:
        return 1.0, 1.0, 1.0
    words, wanted = text.split(), target.split()
    shared = (Counter(words) & Counter(wanted)).total()
    if shared == 0 or text in EXACT_ANSWERS or target in EXACT_ANSWERS:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(words), shared / len(wanted)
    return 2 * precision * recall / (precision + recall), precision, recall


class Regex(Reward):
    """1.0 if the pattern matches, else 0.0; also 0.0 if matching takes too long."""

    kind: Literal["regex"] = "regex"
    pattern: Annotated[str, INERT]
    """Regular expression in the syntax of the ``regex`` package; a dot matches newlines, too."""
    where: Literal["whole", "anywhere"] = "anywhere"
    """Whether the whole text must match, or any part of it."""
    match_timeout_s: float = Field(1.0, gt=0, le=60)
    """Time limit for matching one text, in seconds. Some patterns take exponential time on texts that a policy can
    find."""

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            regex.compile(value, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{value!r} is not a valid regular expression: {error}") from None
        return value

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        pattern = regex.compile(self.pattern, regex.DOTALL)
        match = pattern.fullmatch if self.where == "whole" else pattern.search
        try:
            # concurrent: releases the GIL while matching
            found = await asyncio.to_thread(match, sample.text, timeout=self.match_timeout_s, concurrent=True)
            return Score(value=float(found is not None))
        except TimeoutError:
            return Score(value=0.0, error=f"no match found within match_timeout_s = {self.match_timeout_s:g}")


class Format(Reward):
    """1.0 if each tag occurs exactly once, closed, non-empty and in order, else 0.0."""

    kind: Literal["format"] = "format"
    tags: Annotated[tuple[str, ...], INERT] = Field(("answer",), min_length=1)
    """Tag names in order: ``["think", "answer"]`` requires ``<think>...</think> ... <answer>...</answer>``."""
    text_around: bool = True
    """Allow other text before, between and after the tags."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for tag in self.tags:
            if not tag or set(tag) & set("<>/ \n") or self.tags.count(tag) > 1:
                yield f"tags must be distinct names without <, >, / and whitespace, got {tag!r}"

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        return float(self._matches(sample.text))

    def _matches(self, text: str) -> bool:
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


class Length(Reward):
    """0.0 for short samples, decreasing linearly to -1.0 at `max_tokens`, and -1.0 beyond.

    The soft overlong punishment of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476, equation 13).
    """

    kind: Literal["length"] = "length"
    max_tokens: int = Field(ge=1)
    """Number of generated tokens at which the value reaches -1."""
    slope_tokens: int = Field(ge=1)
    """Number of tokens before `max_tokens` over which the value decreases."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.slope_tokens > self.max_tokens:
            yield f"slope_tokens must be at most max_tokens = {self.max_tokens}, got {self.slope_tokens}"

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        over = sample.num_generated - (self.max_tokens - self.slope_tokens)
        return -min(1.0, max(0, over) / self.slope_tokens)


class Distinct(Reward):
    """1.0 for a text that no other sample of the prompt has, 1/n for one shared by n samples. Counteracts mode
    collapse."""

    kind: Literal["distinct"] = "distinct"
    ignore_case: bool = False
    """Ignore case. White space is always ignored."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        return 1.0

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float]:
        texts = [" ".join(sample.text.split()) for sample in samples]
        texts = [text.casefold() for text in texts] if self.ignore_case else texts
        counts = Counter(texts)
        return [1.0 / counts[text] for text in texts]


class Random(Reward):
    """Uniform in [0, 1). A sample id always gets the same value, on every machine."""

    kind: Literal["random"] = "random"
    seed: int = 0
    """Seed of the values."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        digest = hashlib.blake2b(f"{self.seed}:{sample.id}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53
