"""From TOML files and ``key=value`` overrides to a validated `RunConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from ..components import SLOTS, Component, Settings
from ..errors import ConfigError
from ..plugins.extras import find_extra
from ..plugins.registry import Classes, find_components, load_plugins
from ..settings.expected_types import accepts_value, accepts_words, find_settings_class, get_item_type
from ..settings.validation import Checked, check, validate
from .recipe_values import parse_override, read_toml
from .run import RunConfig

C = TypeVar("C", bound=Component)
S = TypeVar("S", bound=Settings)
__all__ = ["load_config", "merge", "parse_override", "read_toml", "resolve", "resolve_with", "revive", "validate"]


def load_config(
    recipes: str | Path | Sequence[str | Path], overrides: Iterable[str] = (), *, plugins: Iterable[str | Path] = ()
) -> RunConfig:
    """Merge recipes left to right, apply ``key=value`` overrides, select the components, and validate.

    Overrides that set a ``kind`` come first: they replace a table of another kind, but no other override. The run is
    named after the first recipe, unless ``recipe`` is set. ``plugins`` are plugin files to load in addition to those
    that the recipe names. Raises `ConfigError` or `PluginError`.
    """
    files = [recipes] if isinstance(recipes, str | Path) else list(recipes)
    data: dict[str, Any] = {}
    for file in files:
        data = merge(data, read_toml(Path(file)))
    for override in sorted(map(parse_override, overrides), key=_sets_kind, reverse=True):
        data = merge(data, override)
    extra = [str(p) for p in plugins]
    if extra:
        data["plugins"] = [*_plugin_files(data), *extra]
    if files:
        data.setdefault("recipe", Path(files[0]).stem)
    return resolve(data)


def resolve(data: Mapping[str, Any], *, again: bool = True) -> RunConfig:
    """Validate plain data, such as the output of ``config.model_dump(mode="json")``.

    ``again``: see `load_plugins`. Raises `ConfigError` or `PluginError`.
    """
    return resolve_with(load_plugins(files=map(Path, _plugin_files(data)), again=again), data)


def resolve_with(plugins: pluggy.PluginManager, data: Mapping[str, Any]) -> RunConfig:
    """Validate plain data against the components of a plugin manager.

    Raises one `ConfigError` that lists all errors, one per line.
    """
    checked = _pick_table("", RunConfig, {"model": {}, **data}, find_components(plugins))
    if checked.model is None:
        raise ConfigError("\n".join(checked.mistakes))
    return checked.model


def revive(component: C) -> C:
    """Rebuild a component from its plain data, as other processes receive it. Raises `ConfigError`."""
    cls, data = type(component), component.model_dump(mode="json")
    within, _ = _pick_within("", cls, data, find_components(load_plugins()))
    return validate(cls, {**data, **within})


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables key by key. A table with a different ``kind`` replaces the old one, and lists are replaced.

    A numeric key addresses an item of a list: ``rewards.0.weight=2``.
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
        elif isinstance(old, list) and isinstance(value, Mapping) and value and all(map(_is_index, value)):
            merged[key] = _merge_list(key, old, value)
        else:
            merged[key] = value
    return merged


def _sets_kind(value: Any) -> bool:
    return isinstance(value, Mapping) and ("kind" in value or any(map(_sets_kind, value.values())))


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit()  # `int` rejects other digits, such as "\u00b2"


def _merge_list(key: str, old: list[Any], items: Mapping[str, Any]) -> list[Any]:
    merged = list(old)
    for index, value in items.items():
        if len(index) > len(str(len(merged))) or int(index) >= len(merged):
            raise ConfigError(f"{key}.{index}: no such item; {key} has {len(merged)}, counted from 0")
        item = merged[int(index)]
        both = isinstance(item, Mapping) and isinstance(value, Mapping)
        merged[int(index)] = merge({"_": item}, {"_": value})["_"] if both else value
    return merged


def _plugin_files(data: Mapping[str, Any]) -> list[str]:
    files = data.get("plugins", [])
    if not isinstance(files, list | tuple) or not all(isinstance(f, str) for f in files):
        raise ConfigError(f"plugins: must be a list of file names, got {files!r}")
    return list(files)


def _pick(where: str, item: Any, slots: Mapping[str, Classes], slot: str) -> Checked[Component]:
    if isinstance(item, Component):
        return Checked(item)
    if not isinstance(item, Mapping):
        return Checked(None, (f"{where}: must be a table with a kind, got {item!r}",))
    classes = slots[slot]
    kind = item.get("kind", SLOTS[slot].default_kind)
    names = ", ".join(sorted(classes)) or "none"
    if kind is None:
        return Checked(None, (f"{where}.kind: is missing; installed are {names}",))
    if not isinstance(kind, str):
        return Checked(None, (f"{where}.kind: must be a string, got {kind!r}; installed are {names}",))
    if kind not in classes:
        extra = find_extra(slot, kind)
        close = difflib.get_close_matches(kind, classes, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"installed are {names}"
        hint = f"pip install '{extra}'" if extra else hint
        return Checked(None, (f"{where}.kind: {kind!r} is not installed; {hint}",))
    return _pick_table(where, classes[kind], item, slots)


def _pick_table(where: str, cls: type[S], item: Any, slots: Mapping[str, Classes]) -> Checked[S]:
    """Validate a table, including the components within."""
    if isinstance(item, cls):
        return Checked(item)
    if not isinstance(item, Mapping):
        return Checked(None, (f"{where}: must be a table, got {item!r}",))
    within, mistakes = _pick_within(where, cls, item, slots)
    checked = check(cls, {**item, **within}, where, without=mistakes)
    lines = (*(line for wrong in mistakes.values() for line in wrong), *checked.mistakes)
    return Checked(None if lines else checked.model, lines)


def _pick_within(
    where: str, cls: type[Settings], item: Mapping[str, Any], slots: Mapping[str, Classes]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Validate the components within a table: those of a recipe, or those within a component.

    Returns the components and the error lines, by setting. A setting that accepts words or components also accepts the
    kind of a component as a plain string. A component that a table of the recipe requires may be missing if its slot
    has a default; errors within a component that are not about nested components are left to `check`.
    """
    within: dict[str, Any] = {}
    mistakes: dict[str, list[str]] = {}
    in_recipe = not issubclass(cls, Component)
    for name, field in cls.model_fields.items():
        if name not in item and not (in_recipe and field.is_required()):
            continue
        path, annotation = f"{where}.{name}" if where else name, field.rebuild_annotation()
        inner = get_item_type(annotation, 0)
        single, many = slot_of(annotation), slot_of(inner)
        table: Any = find_settings_class(inner) if in_recipe else None
        value = item.get(name, {} if single and in_recipe and field.is_required() else None)
        if single and isinstance(value, str) and accepts_words(annotation) and not accepts_value(annotation, value):
            value = {"kind": value}
        taken = accepts_value(annotation, value)
        checked: dict[Any, Checked[Any]] = {}
        if value is None or not (taken or in_recipe):
            continue
        if single and (isinstance(value, Mapping) or not taken):
            checked = {name: _pick(path, value, slots, single)}
            within[name] = checked[name].model
        elif (many or table) and isinstance(value, Mapping | list | tuple) and taken:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, one in items:
                at = f"{path}.{key}"
                checked[key] = _pick(at, one, slots, many) if many else _pick_table(at, table, one, slots)
            models = {key: one.model for key, one in checked.items()}
            within[name] = models if isinstance(value, Mapping) else list(models.values())
        elif (many or table) and not taken:
            keys = ".".join(part for part in path.split(".") if not part.isdigit())
            wanted = (
                f"table of tables ([{keys}.<name>])"
                if accepts_value(annotation, {})
                else f"list of tables ([[{keys}]])"
            )
            mistakes[name] = [f"{path}: must be a {wanted}, got {value!r}"]
        if lines := [line for one in checked.values() for line in one.mistakes]:
            mistakes[name] = lines
    return within, mistakes


def slot_of(annotation: Any) -> str | None:
    """Return the slot whose components a setting accepts, or None for settings of other types."""
    model = find_settings_class(annotation)
    return next((name for name, slot in SLOTS.items() if slot.base is model), None)
