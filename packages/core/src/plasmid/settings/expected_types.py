"""Describe the values that the annotation of a setting accepts, in users' terms."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from inspect import isclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

SCALARS: Mapping[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
PLURALS: Mapping[Any, str] = {bool: "booleans", int: "integers", float: "numbers", str: "strings"}
BOUNDS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
COLLECTIONS = (tuple, list, set, frozenset, Sequence)


def accepts_value(annotation: Any, value: Any) -> bool:
    """Return True if a value has the setting's type without conversion. Unknown types accept any value."""
    return any(_member_takes(member, value) for member, _ in _members(annotation))


def accepts_words(annotation: Any) -> bool:
    """Return True if the setting accepts fixed words."""
    return any(get_origin(member) is Literal for member, _ in _members(annotation))


def describe(annotation: Any) -> str:
    """``'auto' or an integer of at least 1``, ``a string or a list of strings``."""
    names = [name for member, bounds in _members(annotation) for name in _names(member, bounds)]
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def get_item_type(annotation: Any, index: int | str) -> Any:
    """Return the annotation of an item of a list or a value of a table."""
    for member, _ in _members(annotation):
        args = get_args(member)
        if get_origin(member) in COLLECTIONS and args:
            fixed = get_origin(member) is tuple and Ellipsis not in args
            return args[int(index)] if fixed else args[0]
        if isclass(get_origin(member)) and issubclass(get_origin(member), Mapping) and args:
            return args[1]
    return Any


def find_settings_class(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class of a table, or None for other settings."""
    for member, _ in _members(annotation):
        if isclass(member) and issubclass(member, BaseModel):
            return member
    return None


def get_marks(annotation: Any) -> tuple[Any, ...]:
    """Return the metadata of an `Annotated` setting."""
    return annotation.__metadata__ if get_origin(annotation) is Annotated else ()


def _members(annotation: Any, bounds: str = "") -> Iterator[tuple[Any, str]]:
    """Yield the members of a union with their bounds from `Annotated`. A plain annotation is its only member."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        for arg in args:
            if arg is not type(None):
                yield from _members(arg)
    elif origin is Annotated:
        yield from _members(args[0], _bounds(annotation.__metadata__))
    else:
        yield annotation, bounds


def _bounds(metadata: Sequence[Any]) -> str:
    flat = [m for item in metadata for m in (item, *getattr(item, "metadata", ()))]
    found = [f"{words} {getattr(m, name):g}" for name, words in BOUNDS.items() for m in flat if hasattr(m, name)]
    return " and ".join(found)


def _member_takes(member: Any, value: Any) -> bool:
    origin = get_origin(member)
    if origin is Literal:
        return any(value == arg and type(value) is type(arg) for arg in get_args(member))
    if origin in COLLECTIONS:
        args = get_args(member)
        fixed = origin is tuple and Ellipsis not in args
        return isinstance(value, list | tuple) and (not fixed or len(value) == len(args))
    if _is_table(member):
        return isinstance(value, Mapping)
    if member is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if member is int:
        return not isinstance(value, bool) and (
            isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        )
    return isinstance(value, member) if member in (bool, str) else True


def _is_table(member: Any) -> bool:
    cls = get_origin(member) or member
    return isclass(cls) and issubclass(cls, Mapping | BaseModel)


def _names(member: Any, bounds: str) -> list[str]:
    origin, args = get_origin(member), get_args(member)
    if origin is Literal:
        return [repr(arg) for arg in args]
    if origin in COLLECTIONS:
        if origin is tuple and Ellipsis not in args:
            return [f"a list of {len(args)}"]
        return [f"a list of {PLURALS[args[0]]}" if args[0] in PLURALS else "a list"]
    if _is_table(member):
        return ["a table"]
    name = SCALARS.get(member, str(getattr(member, "__name__", member)))
    return [f"{name} {bounds}" if bounds else name]
