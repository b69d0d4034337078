"""Which settings may be taken from a recipe that lies in a folder of somebody else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trust:
    """Mark of a setting, in its annotation: ``path: Annotated[str, INERT]``."""

    is_inert: bool


INERT = Trust(True)
"""For texts and tables of texts that only say what is read and what it is called: columns, folders of models, names.

A setting that is a number, a truth value or one of a few fixed words is inert without a mark; every other is not.
"""
ACTIVE = Trust(False)
"""For a truth value or a fixed word that lets code run, lets it reach more, or has a run send or start something."""
