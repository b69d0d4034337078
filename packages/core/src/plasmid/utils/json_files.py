"""JSON out of files that somebody else may have written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """The value in a file of JSON. Raises `OSError`, and `ValueError` if it is not JSON or is nested too deeply."""
    return parse_json(file.read_text(encoding="utf-8"))


def parse_json(text: str) -> Any:
    """The value that a text of JSON holds. Raises `ValueError` if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
