"""Where a model comes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model folder, and the table of the recipe that names it."""

    where: str
    path: Path
    trust_remote_code: bool
