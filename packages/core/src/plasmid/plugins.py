"""Finds plugins and answers "which trainers, rewards, ... are installed?"."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pluggy

from . import hookspecs
from .components import Component
from .errors import PluginError

C = TypeVar("C", bound=Component)
Classes = Mapping[str, type[Component]]

SLOTS: Mapping[str, str] = {
    "trainer": "register_trainers",
    "rollout": "register_rollout_engines",
    "algorithm": "register_algorithms",
    "data": "register_data_sources",
    "workflow": "register_workflows",
    "rewards": "register_rewards",
    "filters": "register_filters",
    "trackers": "register_trackers",
    "converters": "register_converters",
}
"""Slot of the recipe -> hook that fills it."""


def load_plugins(*extra: object, files: Iterable[Path] = (), installed: bool = True) -> pluggy.PluginManager:
    """A manager with every installed plugin, then plugin ``files``, then ``extra`` ones (tests pass theirs here).

    ``PLASMID_DISABLE_PLUGINS=a,b`` skips entry points by name: the way out when an installed plugin is broken.
    """
    manager = pluggy.PluginManager("plasmid")
    manager.add_hookspecs(hookspecs)
    disabled = os.environ.get("PLASMID_DISABLE_PLUGINS", "").split(",")
    for entry_point in _entry_points() if installed else ():
        if entry_point.name not in disabled:
            _register(manager, _load(entry_point), entry_point.name)
    for file in files:
        _register(manager, load_file(file), str(file))
    for plugin in extra:
        _register(manager, plugin, type(plugin).__name__)
    return manager


def load_file(path: Path) -> ModuleType:
    """Import a plugin that is a single file. Every process of a run loads it under one module name."""
    if not path.is_file():
        raise PluginError(f"plugins: no such file: {path}")
    name = "plasmid_plugin_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugins: {path} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # boundary: anything may go wrong in a user's file
        raise PluginError(f"plugin file {path} cannot be loaded: {_describe(error)}") from error
    return module


def installed(manager: pluggy.PluginManager) -> dict[str, Classes]:
    """Every installed component class, by slot of the run configuration and then by kind."""
    return {slot: by_kind(getattr(manager.hook, hook)()) for slot, hook in SLOTS.items()}


def by_kind(returned: Iterable[Iterable[type[C]]]) -> Mapping[str, type[C]]:
    """Index the classes that one hook returned by their ``kind``."""
    classes: dict[str, type[C]] = {}
    for cls in (cls for plugin in reversed(list(returned)) for cls in plugin):
        field = cls.model_fields.get("kind")
        if field is None or not isinstance(field.default, str):
            raise PluginError(f'{_where(cls)} has no kind; add `kind: Literal["name"] = "name"` to it')
        kind = field.default
        if kind in classes:
            raise PluginError(
                f"two plugins are named {kind!r}: {_where(classes[kind])} and {_where(cls)}; uninstall one "
                "or set PLASMID_DISABLE_PLUGINS to the name of its entry point"
            )
        classes[kind] = cls
    return classes


def origin(cls: type) -> str:
    """Name and version of the distribution that a component class comes from, or its file."""
    top = cls.__module__.split(".")[0]
    for entry_point in _entry_points():
        if entry_point.module.split(".")[0] == top and entry_point.dist is not None:
            return f"{entry_point.dist.name} {entry_point.dist.version}"
    return str(getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__)


def versions() -> dict[str, str]:
    """Distribution -> version of everything that registers plugins; written beside every checkpoint."""
    return {e.dist.name: e.dist.version for e in _entry_points() if e.dist is not None}


def _entry_points() -> list[EntryPoint]:
    return sorted(entry_points(group="plasmid"), key=lambda e: (e.name, e.value))


def _load(entry_point: EntryPoint) -> object:
    try:
        return entry_point.load()
    except Exception as error:  # boundary: anything may go wrong in a third-party package
        raise PluginError(
            f"plugin {entry_point.name!r} ({entry_point.value}) cannot be loaded: {_describe(error)}; "
            f"uninstall it or set PLASMID_DISABLE_PLUGINS={entry_point.name}"
        ) from error


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except (ValueError, pluggy.PluginValidationError) as error:
        raise PluginError(f"plugin {name!r}: {' '.join(str(error).split())}") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
