"""From TOML files and ``key=value`` overrides to a validated `RunConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from ..components import SLOTS, Component, Settings
from ..errors import ConfigError
from ..plugins.registry import Classes, installed, load_plugins
from ..settings.expected_types import element, model_in, takes
from ..settings.validation import Checked, check, validate
from .evaluation import EvalConfig
from .profiles import Profile
from .recipe_values import parse_override, read_toml
from .run import RunConfig

C = TypeVar("C", bound=Component)
LISTS = ("rewards", "filters", "trackers")
SINGLES = ("trainer", "rollout", "algorithm", "data", "workflow", "buffer")
REQUIRED = ("model", "trainer", "algorithm", "data", "workflow", "buffer")
"""Tables that no recipe does without: one that lacks them is told what has to stand in them."""
__all__ = ["load_config", "merge", "parse_override", "read_toml", "resolve", "resolve_with", "revive", "validate"]


def load_config(
    recipes: str | Path | Sequence[str | Path], overrides: Iterable[str] = (), *, plugins: Iterable[str | Path] = ()
) -> RunConfig:
    """Merge recipes left to right, apply ``key=value`` overrides, pick the components, validate.

    The first recipe names the run, unless ``recipe`` is set.
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
        data.setdefault("recipe", Path(files[0]).stem)
    return resolve(data)


def resolve(data: Mapping[str, Any]) -> RunConfig:
    """Validate plain data. Every actor calls this on what ``config.model_dump(mode="json")`` gave on the driver."""
    return resolve_with(load_plugins(files=map(Path, _plugin_files(data))), data)


def resolve_with(plugins: pluggy.PluginManager, data: Mapping[str, Any]) -> RunConfig:
    """Validate plain data against the components of one plugin manager. Tells all mistakes, one line each."""
    slots = installed(plugins)
    picked = {table: data.get(table, {}) for table in REQUIRED} | dict(data)
    mistakes: dict[str, list[str]] = {}
    for slot in SINGLES:
        if picked.get(slot) is not None:
            checked = _pick(slot, picked[slot], slots, slot)
            picked[slot] = checked.model
            mistakes[slot] = list(checked.mistakes)
    for slot in (*LISTS, "eval"):
        if slot in picked:
            picked[slot], mistakes[slot] = _items(slot, picked[slot], slots)
    if "profiles" in picked:
        picked["profiles"], mistakes["profiles"] = _profiles(picked["profiles"], slots)
    wrong = [slot for slot, lines in mistakes.items() if lines]
    config = check(RunConfig, picked, without=wrong)
    lines = [*(line for slot in wrong for line in mistakes[slot]), *config.mistakes]
    if lines or config.model is None:
        raise ConfigError("\n".join(lines))
    return config.model


def revive(component: C) -> C:
    """A component as other processes get it: from its own plain data. Raises `ConfigError`."""
    cls, data = type(component), component.model_dump(mode="json")
    within, _ = _pick_within("", cls, data, installed(load_plugins()))
    return validate(cls, {**data, **within})


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
        elif (
            isinstance(old, list)
            and isinstance(value, Mapping)
            and value
            and all(k.isascii() and k.isdigit() for k in value)
        ):
            merged[key] = _merge_list(key, old, value)
        else:
            merged[key] = value
    return merged


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit()  # of other digits, as in "\u00b2", `int` makes nothing


def _merge_list(key: str, old: list[Any], items: Mapping[str, Any]) -> list[Any]:
    merged = list(old)
    for index, value in items.items():
        if len(index) > len(str(len(merged))) or int(index) >= len(merged):
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


def _items(slot: str, value: Any, slots: Mapping[str, Classes], where: str = "") -> tuple[list[Any], list[str]]:
    """The items of a list of tables that are right, and what is wrong with the others."""
    where = where or slot
    if not isinstance(value, list | tuple):
        table = ".".join(part for part in where.split(".") if not part.isdigit())
        return [], [f"{where}: must be a list of tables ([[{table}]]), got {value!r}"]
    checked: list[Checked[Any]] = [
        _eval(f"{where}.{i}", item, slots) if slot == "eval" else _pick(f"{where}.{i}", item, slots, slot)
        for i, item in enumerate(value)
    ]
    return [c.model for c in checked], [line for c in checked for line in c.mistakes]


def _eval(where: str, item: Any, slots: Mapping[str, Classes]) -> Checked[EvalConfig]:
    if not isinstance(item, Mapping):
        return Checked(None, (f"{where}: must be a table, got {item!r}",))
    data = _pick(f"{where}.data", item.get("data", {}), slots, "data")
    picked, mistakes = {**item, "data": data.model}, {"data": list(data.mistakes)}
    if item.get("workflow") is not None:
        workflow = _pick(f"{where}.workflow", item["workflow"], slots, "workflow")
        picked["workflow"], mistakes["workflow"] = workflow.model, list(workflow.mistakes)
    if "rewards" in item:
        picked["rewards"], mistakes["rewards"] = _items("rewards", item["rewards"], slots, f"{where}.rewards")
    checked = check(EvalConfig, picked, where, without=[name for name, lines in mistakes.items() if lines])
    return Checked(checked.model, (*(line for lines in mistakes.values() for line in lines), *checked.mistakes))


def _profiles(value: Any, slots: Mapping[str, Classes]) -> tuple[dict[str, Any], list[str]]:
    """The profiles that are right, and what is wrong with the others."""
    if not isinstance(value, Mapping):
        return {}, [f"profiles: must be a table of tables ([profiles.<name>]), got {value!r}"]
    found: dict[str, Any] = {}
    lines: list[str] = []
    for name, item in value.items():
        where = f"profiles.{name}"
        if isinstance(item, Profile):
            found[name] = item
            continue
        if not isinstance(item, Mapping):
            lines.append(f"{where}: must be a table, got {item!r}")
            continue
        within, wrong = _pick_within(where, Profile, item, slots)
        checked = check(Profile, {**item, **within}, where, without=wrong)
        lines += [*(line for mistakes in wrong.values() for line in mistakes), *checked.mistakes]
        found[name] = checked.model
    return found, lines


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
        close = difflib.get_close_matches(kind, classes, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"installed are {names}"
        return Checked(None, (f"{where}.kind: {kind!r} is not installed; {hint}",))
    within, mistakes = _pick_within(where, classes[kind], item, slots)
    checked = check(classes[kind], {**item, **within, "kind": kind}, where, without=mistakes)
    lines = (*(line for wrong in mistakes.values() for line in wrong), *checked.mistakes)
    return Checked(None if lines else checked.model, lines)


def _pick_within(
    where: str, cls: type[Settings], item: Mapping[str, Any], slots: Mapping[str, Classes]
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The components that are settings of a component, as a reward may hold rewards, and what is wrong with them."""
    within: dict[str, Any] = {}
    mistakes: dict[str, list[str]] = {}
    for name, field in cls.model_fields.items():
        value, path = item.get(name), f"{where}.{name}"
        annotation = field.rebuild_annotation()
        single, many = slot_of(annotation), slot_of(element(annotation, 0))
        checked: list[Checked[Component]] = []
        if not takes(annotation, value):
            continue  # `check` will say so
        if single is not None and isinstance(value, Mapping):
            checked = [_pick(path, value, slots, single)]
            within[name] = checked[0].model
        elif many is not None and isinstance(value, list | tuple):
            checked = [_pick(f"{path}.{i}", v, slots, many) for i, v in enumerate(value)]
            within[name] = [c.model for c in checked]
        elif many is not None and isinstance(value, Mapping):
            named = {key: _pick(f"{path}.{key}", v, slots, many) for key, v in value.items()}
            checked = list(named.values())
            within[name] = {key: c.model for key, c in named.items()}
        lines = [line for c in checked for line in c.mistakes]
        if lines:
            mistakes[name] = lines
    return within, mistakes


def slot_of(annotation: Any) -> str | None:
    """The slot whose components a setting takes; None for settings of other types."""
    model = model_in(annotation)
    return next((name for name, slot in SLOTS.items() if slot.base is model), None)
