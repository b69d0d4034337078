"""Row formats of other frameworks: the names of the columns for prompt and ground truth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FormatName = Literal["auto", "none", "verl", "slime", "trl", "openai"]


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Columns of one framework; ``a.b`` addresses a field of an object."""

    name: str
    prompt: str
    target: str
    """Ground truth, or the completion of a demonstration; ``none`` if rows have none."""


PROMPTS = (
    RowFormat("verl", "prompt", "reward_model.ground_truth"),
    RowFormat("slime", "prompt", "label"),
    RowFormat("trl", "prompt", "solution"),
    RowFormat("trl", "prompt", "ground_truth"),
    RowFormat("trl", "prompt", "answer"),
    RowFormat("openai", "messages", "reference_answer"),
    RowFormat("openai", "input", "ideal"),
    RowFormat("openai", "messages", "none"),
)
"""Formats of prompts, in the order in which they are tried."""
DEMONSTRATIONS = (
    RowFormat("trl", "prompt", "completion"),
    RowFormat("verl", "prompt", "response"),
    RowFormat("slime", "prompt", "label"),
)
"""Formats of demonstrations besides ``messages``, which OpenAI, TRL, verl and slime share."""


def find_format(
    row: Mapping[str, Any],
    formats: tuple[RowFormat, ...],
    *,
    wanted: str,
    prompt: str | None,
    target: str | None,
) -> RowFormat | None:
    """Return the first format whose columns are all in the row; None if there is none.

    ``wanted`` is the format set in the recipe, ``prompt`` and ``target`` are the columns set there. TRL's unpaired
    preferences (a completion, and a label that says whether it is good) are not detected: the label is no ground truth,
    and the completion may be a bad one.
    """
    if wanted == "auto" and "completion" in row and isinstance(row.get("label"), bool):
        return None
    for one in formats:
        fits = wanted in ("auto", one.name) and prompt in (None, one.prompt) and target in (None, one.target)
        if fits and has_column(row, one.prompt) and (one.target == "none" or has_column(row, one.target)):
            if one.target == "none" and target is None and wanted == "auto":
                continue  # rows without ground truth are an error unless the recipe allows them
            return one
    return None


def has_column(row: Mapping[str, Any], key: str) -> bool:
    """Return True if the row has the column, or the nested field that ``a.b`` names."""
    if key in row:
        return True
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True
