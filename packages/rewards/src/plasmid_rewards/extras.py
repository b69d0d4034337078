"""Imports of packages that only some rewards need."""

from __future__ import annotations

import importlib
from typing import Any

from plasmid.errors import RewardError


def import_extra(module: str, *, extra: str, kind: str) -> Any:
    """Import an optional package. Raises `RewardError` naming the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise RewardError(f"{kind}: needs the package {error.name}; pip install 'plasmid-rewards[{extra}]'") from None
