"""Describe the settings of components and tables, from their pydantic models."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from plasmid.components import Component
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.plugins.registry import Classes
from plasmid.settings.field_docs import field_docs
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.text import Text

from ..output import table_console
from .tables import FittingTable

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def recipe_tables() -> dict[str, type[BaseModel]]:
    """Return the recipe tables that are not components: name -> model."""
    found = {name: _find_model(field.annotation) for name, field in RunConfig.model_fields.items()}
    return {name: model for name, model in found.items() if model is not None and not issubclass(model, Component)}


def find_settings(what: str, slots: Mapping[str, Classes]) -> tuple[str, type[BaseModel]]:
    """Find a component or table by name. Returns its address and class. Raises `ConfigError` unless there is one."""
    known: dict[str, type[BaseModel]] = {**recipe_tables()}
    known |= {f"{slot}/{kind}": cls for slot, classes in slots.items() for kind, cls in classes.items()}
    if what in known:
        return what, known[what]
    matches = [address for address in known if address.partition("/")[2] == what]
    if len(matches) > 1:
        raise ConfigError(f"{what!r} is the kind of several components; use one of {', '.join(sorted(matches))}")
    if matches:
        return matches[0], known[matches[0]]
    if what in slots:
        kinds = ", ".join(f"{what}/{kind}" for kind in sorted(slots[what])) or "none"
        raise ConfigError(f"{what!r} is a slot; its settings depend on the component: {kinds}")
    bare = {address.rpartition("/")[2] for address in known}
    close = difflib.get_close_matches(what, [*known, *bare], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "`rl options` lists all"
    raise ConfigError(f"no component or table {what!r}; {hint}")


def print_choices(slots: Mapping[str, Classes]) -> None:
    """Print the components and tables that `rl options` can describe."""
    console = table_console()
    console.print("tables:     " + ", ".join(recipe_tables()), highlight=False)
    for slot, classes in slots.items():
        console.print(f"{slot + ':':<12}" + (", ".join(sorted(classes)) or "none"), highlight=False)


def print_settings(address: str, cls: type[BaseModel]) -> None:
    """Print key, type, default and description of every setting."""
    table = FittingTable(("key", "type", "default", "meaning"), list(setting_rows(cls)), wraps_last=True)
    console = table_console()
    first = (inspect.getdoc(cls) or "").split("\n")[0]
    console.print(Text.assemble((address, "bold"), f": {first}"))
    console.print(table, highlight=False)


def setting_rows(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, type, default, description) of every setting, including those of nested tables."""
    docs = field_docs(cls)
    for key, field in sorted(cls.model_fields.items(), key=lambda item: item[0] != "kind"):
        inner = _find_model(field.annotation)
        meaning = " ".join(docs.get(key, "").split())
        if key == "kind":
            yield prefix + key, readable_type(field.annotation), _default(field), meaning or "name of this component"
        elif inner is None or issubclass(inner, Component) or field.is_required():
            yield prefix + key, _describe_type(field), _default(field), meaning
        else:
            optional = _default(field) if field.default is None else ""
            yield prefix + key, "table", optional, meaning
            yield from setting_rows(inner, f"{prefix}{key}.")


def readable_type(annotation: Any) -> str:
    """Format a type for users: ``"adamw" | "sgd"``, ``"auto" | int``, ``list of str``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(_value(a) for a in args)
    if origin in (Union, types.UnionType):
        return " | ".join(readable_type(a) for a in args if a is not type(None))
    if origin in (list, tuple, set, frozenset, Sequence):
        return f"list of {readable_type(args[0])}"
    if origin is not None and inspect.isclass(origin) and issubclass(origin, Mapping):
        return "table"
    if origin is not None:
        return readable_type(args[0])  # Annotated
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "table"
    return str(getattr(annotation, "__name__", annotation)).replace("Path", "str")


def _describe_type(field: FieldInfo) -> str:
    text = readable_type(field.annotation)
    for item in field.metadata:
        for name, sign in BOUNDS.items():
            if hasattr(item, name):
                text += f" {sign} {getattr(item, name):g}"
    return text


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "none" if field.default is None else _value(field.get_default(call_default_factory=True))


def _value(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, BaseModel):
        return "table"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value!r}"


def _find_model(annotation: Any) -> type[BaseModel] | None:
    """Return the settings class in an annotation, which may be optional, a list or ``SerializeAsAny``."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for a in get_args(annotation) if (found := _find_model(a)) is not None), None)
