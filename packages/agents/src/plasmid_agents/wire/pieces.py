"""How a reply is cut up for a stream."""

from __future__ import annotations

from collections.abc import Iterator

PIECE = 32
"""Characters in one piece. Turns are complete when they are streamed, so a piece costs time and tells nothing new."""


def pieces(text: str) -> Iterator[str]:
    """The text, piece after piece."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
