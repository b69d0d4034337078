"""What every pluggable part is made of."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

from ..protocols import RunContext


class Settings(BaseModel):
    """Base of everything that a recipe can set: unknown keys are errors, nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def misfits(self) -> Iterator[str]:
        """What is wrong between settings that are right each by itself, one line each; all are told at once.

        Begin with ``yield from super().misfits()``, so that what base classes find is told, too.
        """
        yield from ()

    @model_validator(mode="after")
    def _has_no_misfits(self) -> Self:
        lines = list(self.misfits())
        if lines:
            raise ValueError("\n".join(lines))
        return self

    def _is_set(self, name: str) -> bool:
        """True if a setting is not what it would be by default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for components: a table of the recipe, a list of tables, or a field of another component."""

    name: str
    """Key of the recipe."""
    base: type[Component]
    """What its components subclass."""
    default_kind: str | None
    """The kind of a table that names none; None if it must name one."""


SLOTS: dict[str, Slot] = {}
"""Every slot by its name; filled as the base classes are defined."""


class Component(Settings, ABC):
    """Base of every pluggable part. Declare ``kind: Literal["name"] = "name"`` to give it its name.

    A base class of a new sort of components names its slot: ``class Reward(Component, slot="rewards")``. Nothing else
    registers a slot.
    """

    def __init_subclass__(cls, *, slot: str | None = None, default_kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if slot is not None:
            SLOTS[slot] = Slot(name=slot, base=cls, default_kind=default_kind)

    def packages(self) -> Mapping[str, str]:
        """Packages that these settings take and that may be missing: module to import -> what pip installs."""
        return {}

    def lacks(self) -> Iterator[str]:
        """What this machine lacks for these settings, one ``<key>: ...`` each. Asked before a run starts."""
        kind = type(self).model_fields["kind"].default
        for name, install in self.packages().items():
            if not _is_installed(name):
                yield f"kind: {kind!r} needs the package {name}; pip install '{install}'"

    async def open(self, context: RunContext) -> None:
        """Called once before first use in each process that uses it. Keep what you open in a private attribute."""

    async def close(self) -> None:
        """Called once after last use."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint must keep so that `restore` continues exactly; JSON types only.

        Asked of trackers and buffer policies, which live in the driver, and of rewards, filters and workflows in each
        worker process. What algorithms remember is lost: they live on every rank. Data keep theirs in a `PromptStream`.
        """
        return {}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """One state out of several: a run that goes on with fewer worker processes has more states than processes.

        By default the first: override it to add up counts, or to unite caches.
        """
        return states[0]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state. Called after `open`."""


def components_in(settings: BaseModel, place: str = "") -> Iterator[tuple[str, Component]]:
    """Every component among the settings, itself included, with its place in the recipe: ``rewards.0.reward``."""
    if isinstance(settings, Component):
        yield place, settings
    for name in type(settings).model_fields:
        yield from _within(getattr(settings, name), f"{place}.{name}" if place else name)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # of a parent package; of a module that was made without a spec
        return False


def _within(value: Any, place: str) -> Iterator[tuple[str, Component]]:
    if isinstance(value, BaseModel):
        yield from components_in(value, place)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _within(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _within(item, f"{place}.{index}")
