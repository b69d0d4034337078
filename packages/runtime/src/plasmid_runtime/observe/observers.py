"""Objects that observe a run: their methods named like hooks, with or without ``@hookimpl``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator

import pluggy
from plasmid.errors import PluginError
from plasmid.plugins import hookspecs

OBSERVER_HOOKS = (
    "run_started",
    "phase_started",
    "group_scored",
    "step_finished",
    "evaluation_advanced",
    "evaluation_finished",
    "checkpoint_begun",
    "checkpoint_saved",
)
ALIKE = 0.85
"""Similarity from which the name of a method is taken for a misspelt hook."""
UNMARKED = pluggy.HookimplOpts(
    wrapper=False, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False, specname=None
)
"""Options of a method without ``@hookimpl``."""


class ObserverManager(pluggy.PluginManager):
    """A plugin manager that takes methods named like an observer hook for implementations of it."""

    def __init__(self) -> None:
        super().__init__("plasmid")
        self.add_hookspecs(hookspecs)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Options of ``@hookimpl``; defaults for a plain method with the name of an observer hook."""
        marked = super().parse_hookimpl_opts(plugin, name)
        if marked is None and name in OBSERVER_HOOKS and inspect.isroutine(getattr(plugin, name, None)):
            return UNMARKED
        return marked


def observer_name(observer: object) -> str:
    """Name of an observer in messages: its ``str`` if its class defines one, else its class."""
    if inspect.isclass(observer):
        return observer.__qualname__
    own = type(observer).__str__ is not object.__str__
    return str(observer) if own else type(observer).__qualname__


def check_observers(observers: Iterable[object]) -> None:
    """Raise `PluginError` for objects of which a run would call nothing, or not what they mean."""
    for observer in observers:
        for mistake in _mistakes(observer):
            raise PluginError(f"observer {observer_name(observer)!r}: {mistake}")


def _mistakes(observer: object) -> Iterator[str]:
    if inspect.isclass(observer):
        yield f"is a class; pass an object of it, {observer.__qualname__}()"
        return
    manager = ObserverManager()
    try:
        manager.register(observer)
    except pluggy.PluginValidationError as error:
        yield " ".join(str(error).split()).rpartition(" hookimpl definition: ")[2]
        return
    implemented = [caller.name for caller in manager.get_hookcallers(observer) or ()]
    everything = [name for name, value in vars(hookspecs).items() if hasattr(value, "plasmid_spec")]
    methods = [
        name for name in dir(observer) if not name.startswith("_") and inspect.isroutine(getattr(observer, name))
    ]
    for name in dict.fromkeys([*implemented, *methods]):
        if name in OBSERVER_HOOKS:
            if inspect.iscoroutinefunction(getattr(observer, name, None)):
                yield f"{name} must not be async; it is called from a thread of its own"
        elif name in everything:
            yield f"{name} is not asked of observers; put it into a plugin file (plugins, or --plugin)"
        elif close := difflib.get_close_matches(name, OBSERVER_HOOKS, n=1, cutoff=ALIKE):
            yield f"there is no hook {name!r}; did you mean {close[0]!r}? (a name that begins with _ is never a hook)"
        elif name in implemented:
            yield f"there is no hook {name!r}; there are {', '.join(OBSERVER_HOOKS)}"
    if not set(implemented) & set(OBSERVER_HOOKS):
        yield f"has no method that a run would call; there are {', '.join(OBSERVER_HOOKS)}"
