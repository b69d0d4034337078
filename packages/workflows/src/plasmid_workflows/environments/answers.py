"""Words that end an episode, and whether they are right."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from plasmid.types import Prompt


def command(action: str, words: Iterable[str]) -> tuple[str, str]:
    """The last ``word: rest`` of an action, rest up to the end of its line; two empty strings if there is none."""
    names = "|".join(map(re.escape, words))
    found = re.findall(rf"(?:^|[^\w])({names})\s*:[ \t]*([^\n]*)", action, re.IGNORECASE)
    return (found[-1][0].lower(), found[-1][1].strip()) if found else ("", "")


def is_right(prompt: Prompt, answer: str) -> bool:
    """True if the answer is the prompt's target, or one of them; numbers are compared as numbers.

    Raises `ValueError` if there is none.
    """
    targets = prompt.target if isinstance(prompt.target, list | tuple) else [prompt.target]
    if not targets or None in targets:
        raise ValueError(f"prompt {prompt.id} has no target to compare with; set data.target_key to its column")
    return any(_same(target, answer) for target in targets)


def _same(target: Any, answer: str) -> bool:
    left, right = (" ".join(str(value).casefold().split()).strip(" .") for value in (target, answer))
    try:
        return float(left) == float(right)
    except ValueError:
        return left == right
