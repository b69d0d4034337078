"""Which settings may differ when a run is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Resume:
    """Mark of a setting, in its annotation: ``batches: Annotated[int, MAY_CHANGE]``."""

    may_change: bool


MAY_CHANGE = Resume(True)
"""For a setting, or a whole table, that may differ when a run is resumed. Without the mark it must be the same."""


def changeable_settings(settings: BaseModel | type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys of the settings and tables that may change on resume, tables within included."""
    cls = settings if isinstance(settings, type) else type(settings)
    for name, field in cls.model_fields.items():
        value = field.annotation if isinstance(settings, type) else getattr(settings, name)
        if any(isinstance(mark, Resume) and mark.may_change for mark in field.metadata):
            yield f"{prefix}{name}"
        elif isinstance(value, BaseModel) or (isinstance(value, type) and issubclass(value, BaseModel)):
            yield from changeable_settings(value, f"{prefix}{name}.")
