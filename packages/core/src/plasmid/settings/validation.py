"""Validate plain data as settings, with one line per error that names the key as the user wrote it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..errors import ConfigError
from .expected_types import accepts_value, describe, find_settings_class, get_item_type
from .resume import FormerName

M = TypeVar("M", bound=BaseModel)
Place = tuple[str | int, ...]
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


@dataclass(frozen=True, slots=True)
class Checked(Generic[M]):
    """A validated model, or the errors in the data, one line each."""

    model: M | None
    mistakes: tuple[str, ...] = ()


def validate(cls: type[M], data: Mapping[str, Any], where: str = "") -> M:
    """Create a model from plain data. Raises `ConfigError` with one line per error. ``where`` is the data's table."""
    checked = check(cls, data, where)
    if checked.model is None:
        raise ConfigError("\n".join(checked.mistakes))
    return checked.model


def check(cls: type[M], data: Mapping[str, Any], where: str = "", *, without: Iterable[str] = ()) -> Checked[M]:
    """Validate plain data without raising. Ignores the keys ``without``.

    Types are strict: unlike pydantic, this does not accept ``"5"`` or ``true`` as numbers.
    """
    ignored = set(without)
    known = {key: value for key, value in data.items() if key not in ignored}
    found = list(_find_type_errors(cls, known, ()))
    model = None
    try:
        model = cls.model_validate(known)
    except ValidationError as error:
        for e in error.errors():
            at, in_union = _place(e, known)
            # without the ignored keys, checks of the whole table would report errors that the user did not make
            hidden = at[0] in ignored if at else bool(ignored)
            whole = in_union or e["type"] == "value_error"
            if not hidden and not any(_explains(place, at, whole) for place, _ in found):
                found.append((at, _describe_type_error(cls, at, known) if in_union else _explain(cls, e, at)))
    lines = tuple(dict.fromkeys(line for place, text in found for line in _lines(where, place, text)))
    return Checked(None if found else model, lines)


def _explains(place: Place, at: Place, whole: bool) -> bool:
    """Return True if an error at ``place`` explains one at ``at``: from outside, or from inside if ``whole``."""
    return at[: len(place)] == place or (whole and place[: len(at)] == at)


def _lines(where: str, place: Place, text: str) -> list[str]:
    path = ".".join([*filter(None, [where]), *map(str, place)]).replace("\n", "\\n")
    return [f"{path}: {line}" if path else line for line in text.splitlines()]


def _find_type_errors(annotation: Any, value: Any, at: Place) -> Iterator[tuple[Place, str]]:
    """Yield errors for values of a wrong type, including those that pydantic would convert."""
    if value is None or isinstance(value, BaseModel):
        return
    if not accepts_value(annotation, value):
        yield at, f"must be {describe(annotation)}, got {value!r}"
    elif isinstance(value, Mapping):
        model = find_settings_class(annotation)
        for name, field in (model.model_fields if model else {}).items():
            if name in value:
                yield from _find_type_errors(field.rebuild_annotation(), value[name], (*at, name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_type_errors(get_item_type(annotation, index), item, (*at, index))


def _place(e: ErrorDetails, data: Any) -> tuple[Place, bool]:
    """Return the location of an error in the data, and whether its path names a union member, which pydantic adds."""
    at: Place = ()
    current = data
    for part in e["loc"]:
        keys = current if isinstance(current, Mapping) else range(len(current)) if isinstance(current, list) else ()
        if part in keys:
            current = current[part]
        elif e["type"] != "missing" or part != e["loc"][-1]:
            return at, True
        at = (*at, part)
    return at, False


def _describe_type_error(cls: type[BaseModel], at: Place, data: Any) -> str:
    annotation: Any = cls
    for part in at:
        fields = _fields(annotation)
        annotation = fields[part].rebuild_annotation() if part in fields else get_item_type(annotation, part)
        data = data[part]
    finite = ", and finite" if isinstance(data, float) and not math.isfinite(data) else ""
    return f"must be {describe(annotation)}{finite}, got {data!r}"


def _explain(cls: type[BaseModel], e: ErrorDetails, at: Place) -> str:
    kind, context = e["type"], e.get("ctx", {})
    if kind == "extra_forbidden":
        fields: Any = cls
        for part in at[:-1]:
            fields = _fields(fields)[part].annotation if part in _fields(fields) else get_item_type(fields, part)
        return _no_such_setting(str(at[-1]), _fields(fields))
    if kind == "missing":
        return "is required"
    message = e["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if kind == "value_error":
        return message
    for name, words in BOUNDS.items():
        if name in context:
            message = f"must be {words} {context[name]:g}"
    if kind == "too_short":
        message = f"must have at least {context['min_length']} item"
    return f"{message.replace('input should be', 'must be').replace('string should', 'must')}, got {e['input']!r}"


def _no_such_setting(name: str, fields: Mapping[Any, Any]) -> str:
    for new, field in fields.items():
        if FormerName(name) in field.metadata:
            return f"is now {new!r}"
    close = difflib.get_close_matches(name, fields, n=1)
    names = ", ".join(sorted(fields))
    hint = f"; did you mean {close[0]!r}?" if close else f"; settings here are {names}" if names else ""
    return f"no such setting{hint}"


def _fields(annotation: Any) -> Mapping[Any, Any]:
    model = find_settings_class(annotation)
    return model.model_fields if model else {}
