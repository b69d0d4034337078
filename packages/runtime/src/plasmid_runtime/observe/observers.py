"""Objects that observe a run: their methods have names of hooks, with or without ``@hookimpl``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import pluggy
from plasmid.errors import PluginError
from plasmid.plugins import hookspecs
from plasmid.plugins.registry import HookManager, describe_arguments

OBSERVER_HOOKS = (
    "run_started",
    "start_advanced",
    "phase_started",
    "group_scored",
    "batch_finished",
    "evaluation_advanced",
    "evaluation_finished",
    "checkpoint_started",
    "checkpoint_saved",
)
MIN_SIMILARITY = 0.85
"""Minimum similarity at which the name of a method counts as a misspelled hook."""
UNMARKED = pluggy.HookimplOpts(
    wrapper=False, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False, specname=None
)
"""Options of a method without ``@hookimpl``."""


class ObserverManager(HookManager):
    """A plugin manager that treats methods with the name of an observer hook as its implementations."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of ``@hookimpl``, or defaults for a plain method with the name of an observer hook."""
        marked = super().parse_hookimpl_opts(plugin, name)
        if marked is None and name in OBSERVER_HOOKS and inspect.isroutine(getattr(plugin, name, None)):
            return UNMARKED
        return marked


def observer_name(observer: object) -> str:
    """Return the name of an observer in messages: its ``str`` if its class defines one, else its class."""
    if inspect.isclass(observer):
        return observer.__qualname__
    own = type(observer).__str__ is not object.__str__
    return str(observer) if own else type(observer).__qualname__


def check_observers(observers: Iterable[object]) -> None:
    """Raise `PluginError` for objects with invalid or misspelled hooks, or with none."""
    for observer in observers:
        for error in _find_errors(observer):
            raise PluginError(f"observer {observer_name(observer)!r}: {error}")


def _find_errors(observer: object) -> Iterator[str]:
    if inspect.isclass(observer):
        yield f"must be an object, got a class; pass {observer.__qualname__}()"
        return
    manager = ObserverManager()
    try:
        manager.register(observer)
    except pluggy.PluginValidationError as error:
        yield describe_arguments(error)
        return
    implemented = [caller.name for caller in manager.get_hookcallers(observer) or ()]
    everything = [name for name, value in vars(hookspecs).items() if hasattr(value, "plasmid_spec")]
    methods = [
        name for name in dir(observer) if not name.startswith("_") and inspect.isroutine(getattr(observer, name))
    ]
    for name in dict.fromkeys([*implemented, *methods]):
        if name in OBSERVER_HOOKS:
            if inspect.iscoroutinefunction(getattr(observer, name, None)):
                yield f"{name} must not be async; it is called from a separate thread"
        elif name in everything:
            yield f"{name} is not an observer hook; put it into a plugin file (plugins, or --plugin)"
        elif name in hookspecs.RENAMED:
            yield f"no such hook: {name!r}; {hookspecs.RENAMED[name]}"
        elif close := difflib.get_close_matches(name, OBSERVER_HOOKS, n=1, cutoff=MIN_SIMILARITY):
            yield f"no such hook: {name!r}; did you mean {close[0]!r}? (names that start with _ are not checked)"
        elif name in implemented:
            yield f"no such hook: {name!r}; hooks are {', '.join(OBSERVER_HOOKS)}"
    if not set(implemented) & set(OBSERVER_HOOKS):
        yield f"has no observer hook; hooks are {', '.join(OBSERVER_HOOKS)}"
