"""The recipe that lies in a checkpoint or a run's folder, which somebody else may have written.

Only inert settings are taken of it (`plasmid.settings.trust`), unless the user trusts the folder: a recipe names
Python files to import, servers to send texts to, and commands to start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ..components import SLOTS
from ..errors import ConfigError, PlasmidError, some_of
from ..plugins.registry import Classes, installed, load_plugins
from ..settings.expected_types import element, marks, model_in, takes
from ..settings.trust import Trust
from .load import merge, parse_override, resolve, slot_of
from .run import RunConfig

WAY_OUT = "if you trust whoever wrote it, add --trust-recipe"
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
    """Resolve the recipe that lies in ``source``, and say in one line what of it was not taken; empty for nothing.

    ``overrides`` and the files ``plugins`` are the user's own, and go before it. ``run`` is where the folder of its run
    is now; without it the recipe's ``run.dir`` counts for nothing. Raises `PlasmidError`.
    """
    files = [str(file) for file in plugins]
    left_out: list[str] = []
    if not trust:
        table = data.get("run")
        chosen = isinstance(table, Mapping) and table.get("dir", "auto") != "auto"
        if chosen:
            data = {**data, "run": {**data["run"], "dir": "auto"}}
        data, left_out = inert_part(data, installed(load_plugins(files=map(Path, files))))
        if chosen and run is not None:
            data = merge(data, {"run": {"dir": str(run)}})
    for override in overrides:
        data = merge(data, parse_override(override))
    stored = data.get("plugins") or ()
    data = {**data, "plugins": [*(stored if isinstance(stored, list | tuple) else (stored,)), *files]}
    notice = f"{source}: of its recipe these settings are not taken: {some_of(left_out)}; {WAY_OUT}"
    try:
        return resolve(data), notice if left_out else ""
    except PlasmidError as error:
        if left_out:
            raise ConfigError(f"{error}\n{notice}, or name a recipe of your own") from None
        raise


def inert_part(data: Mapping[str, Any], slots: Mapping[str, Classes]) -> tuple[dict[str, Any], list[str]]:
    """The settings that neither run, start, reach nor send anything, and the keys of all others."""
    left_out: list[str] = []
    return _Walk(slots, left_out).table(RunConfig, data, ()), left_out


class _Walk:
    """Goes through plain data along the classes that they will be validated with."""

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
        """What is taken of a value: one, or none."""
        marked = [mark.is_inert for mark in marks(annotation) if isinstance(mark, Trust)]
        model, within = model_in(annotation), element(annotation, 0)
        if marked or value is None or isinstance(value, bool | int | float):
            kept, taken = value, all(marked)
        elif isinstance(value, str):
            kept, taken = value, _is_fixed_word(annotation, value)
        elif isinstance(value, Mapping) and model is not None:
            kept, taken = self._component(annotation, model, value, place), True
        elif isinstance(value, Mapping) and within is not Any:
            named = {str(key): list(self._value(within, item, (*place, str(key)))) for key, item in value.items()}
            kept, taken = {key: found[0] for key, found in named.items() if found}, True
        elif isinstance(value, list | tuple) and model_in(within) is not None:
            items = [list(self._value(within, item, (*place, str(i)))) for i, item in enumerate(value)]
            kept, taken = [found[0] for found in items if found], True
        else:
            kept, taken = value, not value or (isinstance(value, list | tuple) and self._are_inert(within, value))
        if taken:
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
        return {"kind": kind} if cls is None else self.table(cls, value, place)  # validation says what is not installed


def _is_fixed_word(annotation: Any, value: str) -> bool:
    """True if the setting takes a few words only, and this is one of them; free text would be taken as well."""
    return takes(annotation, value) and not takes(annotation, f"{value} and more")
