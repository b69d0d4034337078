"""JSON out of files that somebody else may have written, and JSON text of values that need not be JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DEEPEST = 50
"""Levels of nesting that are stored of a value that JSON cannot hold as it is."""


def read_json(file: Path) -> Any:
    """The value in a file of JSON. Raises `OSError`, and `ValueError` if it is not JSON or is nested too deeply."""
    return parse_json(file.read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """The value that a text of JSON holds. Raises `ValueError` if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def to_json(value: Any) -> str:
    """JSON text of what a dataset row or a workflow may hold."""
    try:
        return json.dumps(value, default=_likeness)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, or something that holds itself
        return json.dumps(_plain(value))


def from_json(text: str) -> Any:
    """What `to_json` was given."""
    return json.loads(text)


def _plain(value: Any, above: tuple[int, ...] = ()) -> Any:
    """JSON types with as much of the value as can be told. ``above`` are the ids of what holds it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above or len(above) >= DEEPEST:
        return "..."
    within = (*above, id(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item, within) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, within) for item in value]
    return _plain(_likeness(value), within)


def _likeness(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
