"""Which letter of a multiple choice does the text settle on?"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from plasmid import Prompt, Reward, Sample, Score
from plasmid.errors import RewardError
from plasmid.settings.trust import INERT

from ..mathematics.boxed_text import after_thinking, last_boxed

QUOTES = "\"'\u2018\u2019\u201c\u201d"
LETTER = rf"[*_$(\[{{`{QUOTES}]*(?:\\(?:text|mathrm|textbf)\{{\(?)?([A-Za-z])(?![A-Za-z]|['\u2019][A-Za-z])"
STATED = re.compile(  # *+ leaves one way only to match spaces, of which a policy may write thousands
    r"(?:final\s+answer|correct\s+answer|answer|correct\s+option|correct\s+choice|option|choice)"
    rf"\s*(?:is|:|=|would\s+be|must\s+be)\s*+:?\s*+(?:option|choice)?\s*+{LETTER}",
    re.IGNORECASE,
)
JUDGED = re.compile(r"(?<![A-Za-z])([A-Z])[)\]*.]*\s+is\s+(?:the\s+)?(?:correct|right|best)(?![A-Za-z])")
END = rf"[)\]}}*_.`{QUOTES}$]*+"
HEDGED = re.compile(  # "A, B or C", "A/B": several letters are no choice
    rf"{END}(?:\s*+,\s*+\(?[A-Z]\)?(?![A-Za-z]))*+\s*+(?:,?\s*+\b(?:or|and)\b|/)\s*+(?:option\s++)?+{LETTER}"
)
ARTICLE = re.compile(  # "A matter of taste", not "A because"
    r"\s++(?!(?:after|and|as|because|but|by|due|for|from|given|here|if|in|is|not|on|or|rather|since|when|where|which|while"
    r"|with)(?![a-z]))[a-z]"
)
CAPITAL = re.compile(r"(?<![A-Za-z])[A-Z](?![A-Za-z'])")
ANSWER_TAG = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
ALONE = re.compile(r"(?<![A-Za-z'])(?![AI]\s+[a-z])([A-Z])(?![A-Za-z'])")


class GPQA(Reward):
    """1.0 if the chosen letter is the right one, else 0.0, also if no letter can be made out.

    The last ``\\boxed{C}``, ``<answer>C</answer>`` or statement (``the answer is C``, ``C is correct``) counts, else
    the last capital letter that stands alone. A statement of several letters (``A or B``) is no choice. The target is
    a letter, the index of a choice, or the text of one; choices come from the row's ``choices``. For multiple choice
    as in GPQA (Rein et al. 2023, https://arxiv.org/abs/2311.12022).
    """

    kind: Literal["gpqa"] = "gpqa"
    reads_target: ClassVar[bool] = True
    choices_key: Annotated[str, INERT] = "choices"
    """Column with the list of choices; without it, letters are A to J and the target must be a letter."""
    stated_only: bool = False
    """Do not take a letter that merely stands alone."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        choices = prompt.metadata.get(self.choices_key)
        if choices is not None and (not isinstance(choices, Sequence) or isinstance(choices, str) or not choices):
            raise RewardError(f"gpqa: prompt {prompt.id}: {self.choices_key!r} must be a list of choices")
        letters = string.ascii_uppercase[: len(choices) if choices is not None else 10]
        right = self._target(prompt, choices, letters)
        letter = chosen(after_thinking(sample.text), letters, stated_only=self.stated_only)
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


def chosen(text: str, letters: str, *, stated_only: bool = False) -> str | None:
    """The letter that the text settles on last; None if there is none."""
    boxed, tagged = last_boxed(text), ANSWER_TAG.findall(text)
    for marked in (boxed, tagged[-1] if tagged else None, text if len(text) < 100 else None):
        if marked is not None and (inside := re.fullmatch(rf"{LETTER}[^A-Za-z]*", marked.strip())):
            return inside[1].upper() if inside[1].upper() in letters else None
    if boxed is not None and len({letter for letter in CAPITAL.findall(boxed) if letter in letters}) > 1:
        return None
    stated = [m for pattern in (STATED, JUDGED) for m in pattern.finditer(text) if m[1].upper() in letters]
    # "the answer is a matter of taste" names no choice: a small letter counts only at the end of its statement
    stated = [m for m in stated if m[1].isupper() or re.match(rf"{END}\s*(?:\n|$)", text[m.end(1) :])]
    stated = [m for m in stated if m[1] != "A" or ARTICLE.match(text, m.end(1)) is None]
    if stated:
        last = max(stated, key=lambda m: m.end())
        return None if HEDGED.match(text, last.end(1)) else last[1].upper()
    alone = [] if stated_only else [m[1] for m in ALONE.finditer(text) if m[1] in letters]
    return alone[-1] if alone else None
