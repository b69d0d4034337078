"""The answer that mathematical texts put into a box, and the part of a text that comes after thinking."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)")
WORD = re.compile(r"\S+")
THOUGHT = "</think>"


def last_boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` (or ``\fbox{...}``, ``\boxed x``) holds; None if there is none."""
    end = len(text)
    for box in reversed(list(BOX.finditer(text))):
        content = _content(text, box.end())
        if content is not None:
            return content
        if "{" in text[box.start() : end]:
            return None  # an unfinished box; those before it are not the answer
        end = box.start()
    return None


def _content(text: str, start: int) -> str | None:
    """The group that begins at ``start``: in braces, or one word after a space."""
    if text[start : start + 1] == " " and text[start + 1 : start + 2] not in ("", "{"):
        word = WORD.search(text, start + 1)
        return word[0].rstrip("$.,") or None if word else None
    start = start + 1 if text[start : start + 1] == " " else start
    if text[start : start + 1] != "{":
        return None
    depth, position = 0, start
    while position < len(text):
        if text[position] == "\\":
            position += 2  # \{ and \} are characters of the answer
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
        if depth == 0:
            return text[start + 1 : position - 1].strip()
    return None


def unboxed(text: str) -> str:
    """A target without the box that it may stand in."""
    return last_boxed(text) or text.strip()


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; the whole text if there is none."""
    return text.rpartition(THOUGHT)[2]
