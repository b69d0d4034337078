"""The answer that mathematical texts put into a box, and the part of a text that comes after thinking."""

from __future__ import annotations

import re
from collections.abc import Mapping

BOX = re.compile(r"\\(?:boxed|fbox)")
WORD = re.compile(r"\S+")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or a character that a backslash escapes: ``\\{`` and ``\\}`` are characters of the answer."""
THOUGHT = "</think>"


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed x``) holds; None if there is none."""
    end, closings = len(text), _matching_braces(text)
    for box in reversed(list(BOX.finditer(text))):
        content = _content(text, box.end(), closings)
        if content is not None:
            return content
        if "{" in text[box.start() : end]:
            return None  # an unfinished box; those before it are not the answer
        end = box.start()
    return None


def _matching_braces(text: str) -> dict[int, int]:
    """Opening braces and what closes them, once for all boxes: searched for each, 3,000 open ones took 9 s."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for brace in BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            found[opened.pop()] = brace.start()
    return found


def _content(text: str, start: int, closings: Mapping[int, int]) -> str | None:
    """The group that begins at ``start``: in braces, or one word after a space."""
    if text[start : start + 1] == " " and text[start + 1 : start + 2] not in ("", "{"):
        word = WORD.search(text, start + 1)
        return word[0].rstrip("$.,") or None if word else None
    start = start + 1 if text[start : start + 1] == " " else start
    if text[start : start + 1] != "{":
        return None
    return text[start + 1 : closings[start]].strip() if start in closings else None


def unboxed(text: str) -> str:
    """A target without the boxes that its parts may stand in; several parts are joined by commas."""
    closings = _matching_braces(text)
    contents = [_content(text, box.end(), closings) for box in BOX.finditer(text)]
    return ", ".join(content for content in contents if content) or text.strip()


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; the whole text if there is none."""
    return text.rpartition(THOUGHT)[2]
