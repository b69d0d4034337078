"""Reward for multiple-choice answers."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from plasmid import Prompt, Reward, Sample, Score
from plasmid.errors import RewardError
from plasmid.settings.trust import INERT

from ..mathematics.boxed_text import find_last_boxed, strip_thinking

QUOTES = "\"'\u2018\u2019\u201c\u201d"
LETTER = rf"[*_$(\[{{`{QUOTES}]*(?:\\(?:text|mathrm|textbf)\{{\(?)?([A-Za-z])(?![A-Za-z]|['\u2019][A-Za-z])"
STATED = re.compile(  # possessive *+ prevents backtracking over thousands of spaces
    r"(?:final\s+answer|correct\s+answer|answer|correct\s+option|correct\s+choice|option|choice)"
    rf"\s*(?:is|:|=|would\s+be|must\s+be)\s*+:?\s*+(?:option|choice)?\s*+{LETTER}",
    re.IGNORECASE,
)
JUDGED = re.compile(r"(?<![A-Za-z])([A-Z])[)\]*.]*\s+is\s+(?:the\s+)?(?:correct|right|best)(?![A-Za-z])")
END = rf"[)\]}}*_.`{QUOTES}$]*+"
HEDGED = re.compile(  # "A, B or C", "A/B": several letters are not a choice
    rf"{END}(?:\s*+,\s*+\(?[A-Z]\)?(?![A-Za-z]))*+\s*+(?:,?\s*+\b(?:or|and)\b|/)\s*+(?:option\s++)?+{LETTER}"
)
JOINED = re.compile(r"(?<![A-Za-z'])[A-Z][)\]}*]*\s*(?:,|/|,?\s*\b(?:and|or)\b)\s*(?:option\s+)?[(\[{*]*$")
"""Matches the text before the last letter of "both A and B"."""
ARTICLE = re.compile(  # "A matter of taste", not "A because"
    r"\s++(?!(?:after|and|as|because|but|by|due|for|from|given|here|if|in|is|not|on|or|rather|since|when|where|which|while"
    r"|with)(?![a-z]))[a-z]"
)
CAPITAL = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z'])")
ANSWER_TAG = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
ALONE = re.compile(r"(?<![A-Za-z'])(?![AI]\s+[a-z])([A-Z])(?![A-Za-z'])")


class GPQA(Reward):
    """1.0 if the chosen letter is correct, else 0.0; also 0.0 if no choice can be identified.

    The last ``\\boxed{C}``, ``<answer>C</answer>`` or statement (``the answer is C``, ``C is correct``) counts; without
    any, the last capital letter on its own. A statement of several letters (``A or B``) is not a choice. The target is
    a letter, the index of a choice, or the text of one; choices come from the row's ``choices``. For multiple choice as
    in GPQA (Rein et al. 2023, https://arxiv.org/abs/2311.12022).
    """

    kind: Literal["gpqa"] = "gpqa"
    reads_target: ClassVar[bool] = True
    choices_key: Annotated[str, INERT] = "choices"
    """Column with the list of choices. Without it, letters are A to J and the target must be a letter."""
    stated_only: bool = False
    """Ignore letters on their own that are not part of a statement."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        choices = prompt.metadata.get(self.choices_key)
        if choices is not None and (not isinstance(choices, Sequence) or isinstance(choices, str) or not choices):
            raise RewardError(f"gpqa: prompt {prompt.id}: {self.choices_key!r} must be a list of choices")
        letters = string.ascii_uppercase[: len(choices) if choices is not None else 10]
        right = self._target(prompt, choices, letters)
        letter = find_choice(strip_thinking(sample.text), letters, stated_only=self.stated_only)
        if letter is None:
            return Score(value=0.0, components={"found": 0.0}, error="no letter of a choice in the text")
        return Score(value=float(letter == right), components={"found": 1.0})

    def _target(self, prompt: Prompt, choices: Sequence[object] | None, letters: str) -> str:
        target = prompt.target
        if isinstance(target, int) and not isinstance(target, bool) and 0 <= target < len(letters):
            return letters[target]
        text = str(target).strip()
        if len(text) == 1 and text.upper() in letters:
            return text.upper()
        matches = [i for i, choice in enumerate(choices or ()) if str(choice).strip() == text]
        if len(matches) == 1:
            return letters[matches[0]]
        raise RewardError(
            f"gpqa: prompt {prompt.id} has the target {text[:100]!r}; it must be a letter of {letters[0]} to "
            f"{letters[-1]}, an index from 0, or the text of exactly one choice in {self.choices_key!r}"
        )


def find_choice(text: str, letters: str, *, stated_only: bool = False) -> str | None:
    """Return the last letter that the text chooses; None if there is none."""
    boxed, tagged = find_last_boxed(text), ANSWER_TAG.findall(text)
    for marked in (boxed, tagged[-1] if tagged else None, text if len(text) < 100 else None):
        if marked is not None and (inside := re.fullmatch(rf"{LETTER}[^A-Za-z]*", marked.strip())):
            return inside[1].upper() if inside[1].upper() in letters else None
    if boxed is not None and len({letter for letter in CAPITAL.findall(boxed) if letter in letters}) > 1:
        return None
    stated = [m for pattern in (STATED, JUDGED) for m in pattern.finditer(text) if m[1].upper() in letters]
    # "the answer is a matter of taste" states no choice: a lowercase letter counts only at the end of its statement
    stated = [m for m in stated if m[1].isupper() or re.match(rf"{END}\s*(?:\n|$)", text[m.end(1) :])]
    stated = [m for m in stated if m[1] != "A" or ARTICLE.match(text, m.end(1)) is None]
    if stated:
        last = max(stated, key=lambda m: m.end())
        return None if HEDGED.match(text, last.end(1)) else last[1].upper()
    alone: re.Match[str] | None = None
    for match in () if stated_only else ALONE.finditer(text):  # a list of a million matches keeps the collector busy
        if match[1] in letters:
            alone = match
    if alone is None or JOINED.search(text[max(alone.start() - 40, 0) : alone.start()]):
        return None
    return alone[1]
