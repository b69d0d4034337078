"""Settings that are safe to use from a recipe of an untrusted author."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HUB_MODEL = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[\w.-]+))?", re.ASCII)
HUB_DATA = "hf://"
"""Prefix of data on the Hub."""


def is_hub_model(path: str) -> bool:
    """Return True for ``org/name`` and ``org/name@revision``, unless the path or its parent exists locally."""
    return HUB_MODEL.fullmatch(path) is not None and not Path(path).exists() and not Path(path).parent.is_dir()


@dataclass(frozen=True, slots=True)
class Trust:
    """Marker in the annotation of a setting: ``path: Annotated[str, INERT]``."""

    is_inert: bool
    is_model: bool = False
    """True for strings that may name a model on the Hub, which would be downloaded."""


INERT = Trust(True)
"""Marks strings and tables of strings that only select or name things to read: columns, model folders, names.

Numbers, booleans and fixed words are inert without a marker; all other settings are not.
"""
INERT_MODEL = Trust(True, is_model=True)
"""Marks model folders: inert, unless the value is a name on the Hub. Data on the Hub (``hf://``) is never inert."""
ACTIVE = Trust(False)
"""Marks booleans and fixed words that allow code to run or to access more, or make a run send or start something."""
