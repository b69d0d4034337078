"""Markers of settings that may change when a run is resumed, and of renamed settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Resume:
    """Marker in the annotation of a setting: ``batches: Annotated[int, MAY_CHANGE]``."""

    may_change: bool


MAY_CHANGE = Resume(True)
"""Marks a setting or a table that may change when a run is resumed; unmarked settings must stay the same."""


@dataclass(frozen=True, slots=True)
class FormerName:
    """Marker of a renamed setting: ``attempts: Annotated[int, FormerName("tries")]``.

    Recipes must use the new name. Checkpoints that have the former name can be resumed.
    """

    name: str


def find_changeable_settings(settings: BaseModel | type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of settings and tables that may change on resume, including nested ones.

    For a class, these include the keys of tables that are None by default.
    """
    cls = settings if isinstance(settings, type) else type(settings)
    for name, field in cls.model_fields.items():
        if any(isinstance(mark, Resume) and mark.may_change for mark in field.metadata):
            yield f"{prefix}{name}"
            continue
        for value in _members(field.annotation) if isinstance(settings, type) else (getattr(settings, name),):
            if isinstance(value, BaseModel) or (isinstance(value, type) and issubclass(value, BaseModel)):
                yield from find_changeable_settings(value, f"{prefix}{name}.")


def find_renamed(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the former and the current key of each renamed setting, including nested ones."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, FormerName):
                    yield f"{prefix}{mark.name}", f"{prefix}{name}"
            yield from find_renamed(getattr(value, name), f"{prefix}{name}.")
    elif isinstance(value, Mapping | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from find_renamed(item, f"{prefix}{key}.")


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
