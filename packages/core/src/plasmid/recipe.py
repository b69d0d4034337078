"""From TOML files and ``key=value`` overrides to a validated `RunConfig`."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pluggy
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .components import Component
from .config import EvalConfig, RunConfig
from .errors import ConfigError
from .plugins import Classes, installed, load_plugins

M = TypeVar("M", bound=BaseModel)
DEFAULT_KINDS = {"data": "files", "workflow": "single-turn"}
LISTS = ("rewards", "filters", "trackers")
SINGLES = ("trainer", "rollout", "algorithm", "data", "workflow")


def load_config(
    recipes: str | Path | Sequence[str | Path], overrides: Iterable[str] = (), *, plugins: Iterable[str | Path] = ()
) -> RunConfig:
    """Merge recipes left to right, apply ``key=value`` overrides, pick the components, validate.

    ``plugins`` are plugin files besides those that the recipe names. Raises `ConfigError` or `PluginError`.
    """
    files = [recipes] if isinstance(recipes, str | Path) else list(recipes)
    data: dict[str, Any] = {}
    for file in files:
        data = merge(data, read_toml(Path(file)))
    for override in overrides:
        data = merge(data, parse_override(override))
    extra = [str(p) for p in plugins]
    if extra:
        data["plugins"] = [*_plugin_files(data), *extra]
    if files:
        data.setdefault("recipe", Path(files[-1]).stem)
    return resolve(data)


def resolve(data: Mapping[str, Any]) -> RunConfig:
    """Validate plain data. Every actor calls this on what ``config.model_dump(mode="json")`` gave on the driver."""
    return resolve_with(load_plugins(files=map(Path, _plugin_files(data))), data)


def resolve_with(plugins: pluggy.PluginManager, data: Mapping[str, Any]) -> RunConfig:
    """Validate plain data against the components of one plugin manager."""
    slots = installed(plugins)
    picked = dict(data)
    for slot in SINGLES:
        if slot in DEFAULT_KINDS:
            picked.setdefault(slot, {})
        if picked.get(slot) is not None:
            picked[slot] = _pick(slot, picked[slot], slots[slot], DEFAULT_KINDS.get(slot))
    for slot in LISTS:
        if slot in picked:
            picked[slot] = [_pick(f"{slot}.{i}", v, slots[slot]) for i, v in enumerate(_list(slot, picked[slot]))]
    if "eval" in picked:
        picked["eval"] = [_eval(i, v, slots) for i, v in enumerate(_list("eval", picked["eval"]))]
    return validate(RunConfig, picked)


def read_toml(path: Path) -> dict[str, Any]:
    """One recipe file as plain data."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the recipe: {(error.strerror or str(error)).lower()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_override(text: str) -> dict[str, Any]:
    """``trainer.lr=1e-6`` -> ``{"trainer": {"lr": 1e-6}}``; the value is TOML, or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"override {text!r} must look like key=value, for example trainer.lr=1e-6")
    try:
        leaf: Any = tomllib.loads(f"v = {value}")["v"]
    except tomllib.TOMLDecodeError:
        leaf = value
    *parents, last = key.split(".")
    tree: dict[str, Any] = {last: leaf}
    for parent in reversed(parents):
        tree = {parent: tree}
    return tree


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key, except that another ``kind`` starts its table anew; lists are replaced.

    A number as key reaches into a list: ``rewards.0.weight=2``.
    """
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            merged[key] = merge(old, value)
        elif isinstance(old, list) and isinstance(value, Mapping) and value and all(k.isdigit() for k in value):
            merged[key] = _merge_list(key, old, value)
        else:
            merged[key] = value
    return merged


def _merge_list(key: str, old: list[Any], items: Mapping[str, Any]) -> list[Any]:
    merged = list(old)
    for index, value in items.items():
        if int(index) >= len(merged):
            raise ConfigError(f"{key}.{index}: there is no such item; {key} has {len(merged)}, counted from 0")
        item = merged[int(index)]
        both = isinstance(item, Mapping) and isinstance(value, Mapping)
        merged[int(index)] = merge({"_": item}, {"_": value})["_"] if both else value
    return merged


def _plugin_files(data: Mapping[str, Any]) -> list[str]:
    files = data.get("plugins", [])
    if not isinstance(files, list | tuple) or not all(isinstance(f, str) for f in files):
        raise ConfigError(f"plugins: must be a list of file names, got {files!r}")
    return list(files)


def _list(slot: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{slot}: must be a list of tables ([[{slot}]]), got {value!r}")
    return list(value)


def _eval(index: int, item: Any, slots: Mapping[str, Classes]) -> EvalConfig:
    where = f"eval.{index}"
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: must be a table, got {item!r}")
    picked = dict(item)
    if "data" in picked:
        picked["data"] = _pick(f"{where}.data", picked["data"], slots["data"], DEFAULT_KINDS["data"])
    return validate(EvalConfig, picked, where)


def _pick(where: str, item: Any, classes: Classes, default: str | None = None) -> Component:
    if isinstance(item, Component):
        return item
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where}: must be a table with a kind, got {item!r}")
    kind = item.get("kind", default)
    names = ", ".join(sorted(classes)) or "none"
    if kind is None:
        raise ConfigError(f"{where}.kind: is missing; installed are {names}")
    if not isinstance(kind, str):
        raise ConfigError(f"{where}.kind: must be a string, got {kind!r}; installed are {names}")
    if kind not in classes:
        close = difflib.get_close_matches(kind, classes, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{where}.kind: {kind!r} is not installed{hint}; installed are {names}")
    return validate(classes[kind], {**item, "kind": kind}, where)


def validate(cls: type[M], data: Mapping[str, Any], where: str = "") -> M:
    """A model from plain data, or `ConfigError` with one line for each mistake."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explain(cls, e, where) for e in error.errors()))) from None


def _explain(cls: type[BaseModel], e: ErrorDetails, where: str) -> str:
    loc = [str(part) for part in e["loc"]]
    path = ".".join(filter(None, [where, *loc]))
    if e["type"] == "extra_forbidden":
        fields = _fields_at(cls, loc[:-1])
        close = difflib.get_close_matches(loc[-1], fields, n=1)
        return f"{path}: no such setting" + (f"; did you mean {close[0]!r}?" if close else _choices(fields))
    message = e["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if e["type"] == "missing":
        return f"{path}: is required"
    if e["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: {message}, got {e['input']!r}"


def _choices(fields: Iterable[str]) -> str:
    names = ", ".join(sorted(fields))
    return f"; settings here are {names}" if names else ""


def _fields_at(cls: type[BaseModel], loc: Sequence[str]) -> Mapping[str, Any]:
    """Names that are allowed in the table that ``loc`` leads to."""
    current: Any = cls
    for part in loc:
        fields = getattr(current, "model_fields", {})
        if part in fields:
            current = _model_in(fields[part].annotation)
    return getattr(current, "model_fields", {})


def _model_in(annotation: Any) -> Any:
    args = getattr(annotation, "__args__", ())
    return next((a for a in args if isinstance(a, type) and issubclass(a, BaseModel)), annotation)
