"""Finds plugins and answers "which trainers, rewards, ... are installed?"."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from ..components import SLOTS, Component, Converter, DataSource, Slot
from ..errors import PluginError, line_in, one_line
from . import hookspecs
from .module_file import import_file

Classes = Mapping[str, type[Component]]

HOOK = "register_components"


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
        if manager.has_plugin(str(file)):
            raise PluginError(f"plugins: {file} is named twice; remove one")
        _register(manager, load_file(file), str(file))
    for plugin in extra:
        _register(manager, plugin, type(plugin).__name__)
    return manager


def load_file(path: Path) -> ModuleType:
    """Import a plugin that is a single file. Every process of a run loads it under one module name."""
    if not path.is_file():
        raise PluginError(f"plugins: no such file: {path}")
    name = "plasmid_plugin_" + re.sub(r"\W", "_", path.stem)
    if path.suffix != ".py":
        raise PluginError(f"plugins: {path} is no Python file; its name must end in .py")
    try:
        return import_file(path, name, again=True)
    except (Exception, SystemExit) as error:  # boundary: anything may go wrong in a user's file
        raise PluginError(f"plugin file {path} cannot be loaded: {one_line(error)}{_line_in(path, error)}") from error


def installed(manager: pluggy.PluginManager) -> dict[str, Classes]:
    """Every installed component class, by slot of the run configuration and then by kind. Raises `PluginError`."""
    classes: dict[str, dict[str, type[Component]]] = {slot: {} for slot in sorted(SLOTS)}
    owners: dict[type[Component], str] = {}
    for implementation in manager.hook.register_components.get_hookimpls():
        owner = implementation.plugin_name
        for cls in _returned(implementation.function, owner):
            slot = _slot(cls, owner)
            kind = _kind(cls, slot.base, owner)
            found = classes.setdefault(slot.name, {})
            if kind in found:
                first = f"{_where(found[kind])} of plugin {owners[found[kind]]!r}"
                raise PluginError(
                    f"{slot.name}: two components are named {kind!r}: {first} and {_where(cls)} of plugin {owner!r}; "
                    f"rename one{_way_out(owners[found[kind]], owner)}"
                )
            found[kind], owners[cls] = cls, owner
    return dict(classes)


def converters(manager: pluggy.PluginManager) -> Mapping[str, type[Converter]]:
    """Every installed converter class by its kind. Raises `PluginError`."""
    return {kind: cls for kind, cls in installed(manager)["converters"].items() if issubclass(cls, Converter)}


def _way_out(*owners: str) -> str:
    names = {entry_point.name for entry_point in _entry_points()}
    return "".join(f" or set PLASMID_DISABLE_PLUGINS={owner}" for owner in owners if owner in names)


def _not_async(cls: type[Component], base: type[Component]) -> Iterator[str]:
    """Methods that are plain functions where the base class has async ones."""
    declared = {name: method for parent in reversed(base.__mro__) for name, method in vars(parent).items()}
    for name, method in declared.items():
        if inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(inspect.unwrap(getattr(cls, name))):
            yield name


def _returned(function: Callable[[], Any], owner: str) -> list[Any]:
    try:
        return list(function())
    except Exception as error:  # boundary: hooks are third-party code
        raise PluginError(f"plugin {owner!r}: {HOOK} must return a list of classes: {one_line(error)}") from error


def _slot(cls: Any, owner: str) -> Slot:
    """The slot that a class is for, by its base class."""
    for slot in SLOTS.values():
        if inspect.isclass(cls) and issubclass(cls, slot.base):
            return slot
    bases = ", ".join(sorted(slot.base.__name__ for slot in SLOTS.values()))
    raise PluginError(f"plugin {owner!r}: {HOOK} must return subclasses of {bases}; got {cls!r:.100}")


def _kind(cls: type[Component], base: type[Component], owner: str) -> str:
    """The kind of a component class, after checking that it is one that can be used."""
    field = cls.model_fields.get("kind")
    if field is None or not isinstance(field.default, str):
        raise PluginError(f'plugin {owner!r}: {_where(cls)} has no kind; add `kind: Literal["name"] = "name"` to it')
    for name in _not_async(cls, base):
        raise PluginError(f"plugin {owner!r}: {_where(cls)}.{name} must be async; write `async def {name}(...)`")
    for name in ("open", "close"):
        if base is DataSource and getattr(cls, name) is not getattr(DataSource, name):
            raise PluginError(
                f"plugin {owner!r}: {_where(cls)}.{name} is never called; a data source is opened by its `stream`, and "
                "closed by `PromptStream.close`"
            )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise PluginError(f"plugin {owner!r}: {_where(cls)} lacks what plasmid.{base.__name__} needs: {missing}")
    return field.default


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
    except (Exception, SystemExit) as error:  # boundary: anything may go wrong in a third-party package
        raise PluginError(
            f"plugin {entry_point.name!r} ({_package(entry_point)}) cannot be loaded: {one_line(error)}; "
            f"uninstall it or set PLASMID_DISABLE_PLUGINS={entry_point.name}"
        ) from error


def _package(entry_point: EntryPoint) -> str:
    return entry_point.value if entry_point.dist is None else f"{entry_point.dist.name} {entry_point.dist.version}"


def _register(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    try:
        manager.register(plugin, name=name)
    except ValueError as error:
        raise PluginError(f"plugin {name!r}: is loaded already under another name; uninstall one of the two") from error
    except pluggy.PluginValidationError as error:
        what = " ".join(str(error).split()).rpartition(" hookimpl definition: ")[2]
        raise PluginError(f"plugin {name!r}: {what}") from error
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec():
            close = difflib.get_close_matches(caller.name, _hook_names(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_hook_names())}"
            raise PluginError(f"plugin {name!r}: there is no hook {caller.name!r}; {hint}")
    if not callers:
        raise PluginError(
            f"plugin {name!r}: has no hooks; decorate its functions, for example register_components, with @hookimpl"
        )
    for hook in _hook_names():
        function = getattr(plugin, hook, None)
        ours = function is getattr(hookspecs, hook)
        if inspect.isroutine(function) and not ours and manager.parse_hookimpl_opts(plugin, hook) is None:
            raise PluginError(f"plugin {name!r}: {hook} has no @hookimpl, so it would never be called; decorate it")


def _hook_names() -> list[str]:
    return sorted(name for name, function in vars(hookspecs).items() if hasattr(function, "plasmid_spec"))


def _line_in(path: Path, error: BaseException) -> str:
    """Where in the file an error came from; syntax errors say it themselves."""
    line = line_in(path, error)
    return "" if line is None else f" (line {line})"


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
