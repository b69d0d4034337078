"""The recipe stored in a checkpoint or a run folder, which may come from an untrusted author.

A recipe names Python files to import, servers to send texts to, and commands to start. Therefore only its inert
settings (`plasmid.settings.trust`) are used, unless the user trusts the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..components import SLOTS
from ..errors import ConfigError, PlasmidError, abbreviate
from ..plugins.registry import Classes, find_components, load_plugins
from ..settings.expected_types import accepts_value, find_settings_class, get_item_type, get_marks
from ..settings.trust import HUB_DATA, Trust, is_hub_model
from .load import merge, parse_override, resolve, slot_of
from .run import RunConfig

TRUST_HINT = "add --trust-recipe if you trust its author"
Place = tuple[str, ...]


def resolve_stored(
    data: Mapping[str, Any],
    source: Path,
    *,
    overrides: Iterable[str] = (),
    plugins: Sequence[str | Path] = (),
    run: Path | None = None,
    trust: bool = False,
) -> tuple[RunConfig, str]:
    """Resolve the recipe stored in ``source``. Returns it with a one-line notice of ignored settings, or "" for none.

    ``overrides`` and the files ``plugins`` come from the user and take precedence. ``run`` is the present location of
    the run folder; without it the recipe's ``run.dir`` is ignored. Raises `PlasmidError`.
    """
    files = [str(file) for file in plugins]
    left_out: list[str] = []
    if not trust:
        table = data.get("run")
        chosen = isinstance(table, Mapping) and table.get("dir", "auto") != "auto"
        if chosen:
            data = {**data, "run": {**data["run"], "dir": "auto"}}
        data, left_out = split_inert_settings(data, find_components(load_plugins(files=map(Path, files))))
        if chosen and run is not None:
            data = merge(data, {"run": {"dir": str(run)}})
    for override in overrides:
        data = merge(data, parse_override(override))
    stored = data.get("plugins") or ()
    data = {**data, "plugins": [*(stored if isinstance(stored, list | tuple) else (stored,)), *files]}
    notice = f"{source}: these settings of its recipe are ignored: {abbreviate(left_out)}; {TRUST_HINT}"
    try:
        return resolve(data), notice if left_out else ""
    except PlasmidError as error:
        if left_out:
            raise ConfigError(f"{error}\n{notice}, or set them on the command line") from None
        raise


def split_inert_settings(data: Mapping[str, Any], slots: Mapping[str, Classes]) -> tuple[dict[str, Any], list[str]]:
    """Split a recipe into its inert settings, which cannot run or contact anything, and the keys of all others."""
    left_out: list[str] = []
    return _Walk(slots, left_out).table(RunConfig, data, ()), left_out


class _Walk:
    """Walks plain data along the classes that will validate it."""

    def __init__(self, slots: Mapping[str, Classes], left_out: list[str]) -> None:
        self._slots, self._left_out = slots, left_out

    def table(self, cls: type[BaseModel], data: Mapping[str, Any], place: Place) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for name, value in data.items():
            field, where = cls.model_fields.get(str(name)), (*place, str(name))
            if field is not None and value == field.get_default(call_default_factory=True):
                kept[name] = value
            elif field is None:
                self._left_out.append(".".join(where))
            else:
                for found in self._value(field.rebuild_annotation(), value, where):
                    kept[name] = found
        return kept

    def _value(self, annotation: Any, value: Any, place: Place) -> Iterator[Any]:
        """Yield the inert part of a value, or nothing if it has none."""
        trust = [mark for mark in get_marks(annotation) if isinstance(mark, Trust)]
        marked = [mark.is_inert for mark in trust]
        model, within = find_settings_class(annotation), get_item_type(annotation, 0)
        if marked or value is None or isinstance(value, bool | int | float):
            kept = value
            is_used = all(marked) and not _is_download(value, is_model=any(mark.is_model for mark in trust))
        elif isinstance(value, str):
            kept, is_used = value, _is_fixed_word(annotation, value)
        elif isinstance(value, Mapping) and model is not None:
            kept, is_used = self._component(annotation, model, value, place), True
        elif isinstance(value, Mapping) and within is not Any:
            named = {str(key): list(self._value(within, item, (*place, str(key)))) for key, item in value.items()}
            kept, is_used = {key: found[0] for key, found in named.items() if found}, True
        elif isinstance(value, list | tuple) and find_settings_class(within) is not None:
            items = [list(self._value(within, item, (*place, str(i)))) for i, item in enumerate(value)]
            kept, is_used = [found[0] for found in items if found], True
        else:
            kept, is_used = value, not value or (isinstance(value, list | tuple) and self._are_inert(within, value))
        if is_used:
            yield kept
        else:
            self._left_out.append(".".join(place))

    def _are_inert(self, annotation: Any, values: Sequence[Any]) -> bool:
        walk = _Walk(self._slots, [])
        return all(list(walk._value(annotation, value, ())) for value in values)

    def _component(self, annotation: Any, model: type[BaseModel], value: Mapping[str, Any], place: Place) -> Any:
        slot = slot_of(annotation)
        if slot is None:
            return self.table(model, value, place)
        kind = value.get("kind", SLOTS[slot].default_kind)
        cls = self._slots[slot].get(str(kind))
        return {"kind": kind} if cls is None else self.table(cls, value, place)  # validation reports a missing kind


def _is_download(value: Any, *, is_model: bool) -> bool:
    """Return True if a value contains, at any depth, something that this machine would download."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str) and (value.startswith(HUB_DATA) or (is_model and is_hub_model(value))):
            return True
        stack += value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return False


def _is_fixed_word(annotation: Any, value: str) -> bool:
    """Return True if the setting accepts only fixed words, this one included. Settings of free text do not count."""
    return accepts_value(annotation, value) and not accepts_value(annotation, f"{value} and more")
