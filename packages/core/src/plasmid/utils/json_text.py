"""Read JSON from untrusted files, and convert arbitrary values to JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .safe_files import check_readable

DEEPEST = 50
"""Maximum nesting to store of a value that is not plain JSON."""


def read_json(file: Path) -> Any:
    """Read a JSON file. Raises `OSError`, and `ValueError` if it is not JSON or is nested too deeply."""
    check_readable(file)
    return parse_json(file.read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """Parse JSON. Raises `ValueError` if the text is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_json(value: Any) -> str:
    """Convert any value of a dataset row or a workflow to JSON."""
    try:
        return json.dumps(value, default=_describe)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, or circular references
        return json.dumps(_to_json_types(value))


def from_json(text: str) -> Any:
    """Parse the output of `to_json`."""
    return json.loads(text)


def _to_json_types(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Convert a value to JSON types as far as possible. ``above`` are the ids of its containers."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in above or len(above) >= DEEPEST:
        return "..."
    within = (*above, id(value))
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item, within) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_types(item, within) for item in value]
    return _to_json_types(_describe(value), within)


def _describe(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
