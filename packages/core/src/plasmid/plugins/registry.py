"""Find plugins and the component classes that they register."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy

from ..components import SLOTS, Component, Converter, DataSource, ModelFamily, Slot
from ..errors import PluginError, one_line
from . import hookspecs
from .module_file import load_file, loaded_files

Classes = Mapping[str, type[Component]]

HOOK, FAMILIES_HOOK = "register_components", "register_families"


class HookManager(pluggy.PluginManager):
    """A plugin manager with Plasmid's hooks.

    Skips attributes without a hook marker: pluggy looks each one up statically, which took a sixth of a short run.
    """

    def __init__(self) -> None:
        super().__init__("plasmid")
        self.add_hookspecs(hookspecs)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> pluggy.HookspecOpts | None:
        """Return the options of ``@hookspec``, if the attribute has them."""
        return super().parse_hookspec_opts(module_or_class, name) if name in _hook_names() else None

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> pluggy.HookimplOpts | None:
        """Return the options of ``@hookimpl``, if the attribute has them."""
        unmarked = inspect.ismodule(plugin) and not hasattr(vars(plugin).get(name), "plasmid_impl")
        return None if unmarked or name.startswith("__") else super().parse_hookimpl_opts(plugin, name)


def load_plugins(
    *extra: object, files: Iterable[Path] = (), installed: bool = True, again: bool = True
) -> pluggy.PluginManager:
    """Create a manager with all installed plugins, then plugin ``files``, then ``extra`` ones (for tests).

    ``again`` imports the files also if this process has already imported them. Actors of a run pass False: if they
    are threads of one process, they must all use the classes of one import, which may be sent to other processes.

    ``PLASMID_DISABLE_PLUGINS=a,b`` skips entry points by name, in case an installed plugin is broken.
    """
    manager = HookManager()
    disabled = os.environ.get("PLASMID_DISABLE_PLUGINS", "").split(",")
    for entry_point in _entry_points() if installed else ():
        if entry_point.name not in disabled:
            _register(manager, _load(entry_point), entry_point.name)
    for file in files:
        if manager.has_plugin(str(file)):
            raise PluginError(f"plugins: {file} is listed twice; remove one")
        _register(manager, load_file(file, again=again), str(file))
    for plugin in extra:
        _register(manager, plugin, type(plugin).__name__)
    return manager


def find_components(manager: pluggy.PluginManager) -> dict[str, Classes]:
    """Return all installed component classes, by slot and kind. Raises `PluginError`."""
    classes: dict[str, dict[str, type[Component]]] = {slot: {} for slot in sorted(SLOTS)}
    owners: dict[type[Component], str] = {}
    for implementation in manager.hook.register_components.get_hookimpls():
        owner = implementation.plugin_name
        for cls in _call_hook(implementation.function, owner, HOOK, "classes"):
            slot = _slot(cls, owner)
            kind = _kind(cls, slot.base, owner)
            found = classes.setdefault(slot.name, {})
            if kind in found:
                first = f"{_where(found[kind])} of plugin {owners[found[kind]]!r}"
                raise PluginError(
                    f"{slot.name}: two components are named {kind!r}: {first} and {_where(cls)} of plugin {owner!r}; "
                    f"rename one{_disable_hint(owners[found[kind]], owner)}"
                )
            found[kind], owners[cls] = cls, owner
    return dict(classes)


def find_families(manager: pluggy.PluginManager) -> dict[str, ModelFamily]:
    """Return the model families of all plugins, by model type. Raises `PluginError` if two disagree."""
    found: dict[str, ModelFamily] = {}
    owners: dict[str, list[str]] = {}
    for implementation in manager.hook.register_families.get_hookimpls():
        owner = implementation.plugin_name
        for family in _call_hook(implementation.function, owner, FAMILIES_HOOK, "ModelFamily objects"):
            if not isinstance(family, ModelFamily):
                raise PluginError(
                    f"plugin {owner!r}: {FAMILIES_HOOK} must return ModelFamily objects, got {family!r:.100}"
                )
            name = family.model_type
            try:
                found[name] = found[name].merge(family) if name in found else family
            except ValueError as error:
                raise PluginError(
                    f"plugin {owner!r}: family {name!r}: plugin {owners[name][-1]!r} already registers {error}"
                    f"; remove one{_disable_hint(*owners[name], owner)}"
                ) from None
            owners.setdefault(name, []).append(owner)
    return found


def get_loaded_families() -> dict[str, ModelFamily]:
    """Return the families of installed plugins and of the plugin files that this process has loaded."""
    manager = load_plugins()
    for module in loaded_files():
        if hasattr(module, FAMILIES_HOOK):
            _register(manager, module, str(module.__file__))
    return find_families(manager)


def converters(manager: pluggy.PluginManager) -> Mapping[str, type[Converter]]:
    """Return all installed converter classes by kind. Raises `PluginError`."""
    return {kind: cls for kind, cls in find_components(manager)["converters"].items() if issubclass(cls, Converter)}


def _disable_hint(*owners: str) -> str:
    names = {entry_point.name for entry_point in _entry_points()}
    return "".join(f" or set PLASMID_DISABLE_PLUGINS={owner}" for owner in owners if owner in names)


def _find_sync_methods(cls: type[Component], base: type[Component]) -> Iterator[str]:
    """Yield methods that are sync although they are async in the base class."""
    for name in _find_async_methods(base):
        if not inspect.iscoroutinefunction(inspect.unwrap(getattr(cls, name))):
            yield name


@functools.cache
def _find_async_methods(base: type[Component]) -> tuple[str, ...]:
    """Return the async methods of the base class of a slot."""
    declared = {name: method for parent in reversed(base.__mro__) for name, method in vars(parent).items()}
    return tuple(name for name, method in declared.items() if inspect.iscoroutinefunction(method))


def _call_hook(function: Callable[[], Any], owner: str, hook: str, items: str) -> list[Any]:
    try:
        return list(function())
    except Exception as error:  # boundary: hooks are third-party code
        raise PluginError(f"plugin {owner!r}: {hook} must return a list of {items}: {one_line(error)}") from error


def _slot(cls: Any, owner: str) -> Slot:
    """Return the slot of a class, determined by its base class."""
    for slot in SLOTS.values():
        if inspect.isclass(cls) and issubclass(cls, slot.base):
            return slot
    bases = ", ".join(sorted(slot.base.__name__ for slot in SLOTS.values()))
    raise PluginError(f"plugin {owner!r}: {HOOK} must return subclasses of {bases}; got {cls!r:.100}")


def _kind(cls: type[Component], base: type[Component], owner: str) -> str:
    """Check that a component class is usable, and return its kind."""
    field = cls.model_fields.get("kind")
    if field is None or not isinstance(field.default, str):
        raise PluginError(f'plugin {owner!r}: {_where(cls)} has no kind; add `kind: Literal["name"] = "name"` to it')
    for name in _find_sync_methods(cls, base):
        raise PluginError(f"plugin {owner!r}: {_where(cls)}.{name} must be async; write `async def {name}(...)`")
    for name in ("open", "close"):
        if base is DataSource and getattr(cls, name) is not getattr(DataSource, name):
            raise PluginError(
                f"plugin {owner!r}: {_where(cls)}.{name} is never called; open the source in its `stream`, and close "
                "it in `PromptStream.close`"
            )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise PluginError(f"plugin {owner!r}: {_where(cls)} lacks methods of plasmid.{base.__name__}: {missing}")
    return field.default


def describe_origin(cls: type) -> str:
    """Return name and version of the distribution that provides a component class, or its file."""
    top = cls.__module__.split(".")[0]
    for entry_point in _entry_points():
        if entry_point.module.split(".")[0] == top and entry_point.dist is not None:
            return f"{entry_point.dist.name} {entry_point.dist.version}"
    return str(getattr(sys.modules.get(cls.__module__), "__file__", None) or cls.__module__)


def versions() -> dict[str, str]:
    """Return the versions of all distributions that register plugins, which are stored with checkpoints."""
    return dict(_find_installed(_search_path())[1])


def _entry_points() -> tuple[EntryPoint, ...]:
    return _find_installed(_search_path())[0]


@functools.lru_cache(maxsize=1)
def _find_installed(search_path: object) -> tuple[tuple[EntryPoint, ...], Mapping[str, str]]:
    """Return the entry points, and the versions of their distributions: finding them reads a file of every package."""
    found = tuple(sorted(entry_points(group="plasmid"), key=lambda e: (e.name, e.value)))
    return found, {e.dist.name: e.dist.version for e in found if e.dist is not None}


def _search_path() -> tuple[object, ...]:
    """Return the folders of `sys.path` and the times of their last changes, by which changes of the installed packages
    are detected."""
    return tuple((path, _changed(path or ".")) for path in sys.path)


def _changed(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


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
        raise PluginError(f"plugin {name!r}: is already loaded under another name; uninstall one of the two") from error
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {name!r}: {describe_arguments(error)}") from error
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec():
            close = difflib.get_close_matches(caller.name, _hook_names(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"hooks are {', '.join(_hook_names())}"
            hint = hookspecs.RENAMED.get(caller.name, hint)
            raise PluginError(f"plugin {name!r}: no such hook: {caller.name!r}; {hint}")
    if not callers:
        raise PluginError(
            f"plugin {name!r}: has no hooks; decorate its functions, for example register_components, with @hookimpl"
        )
    for hook in _hook_names():
        function = getattr(plugin, hook, None)
        ours = function is getattr(hookspecs, hook)
        if inspect.isroutine(function) and not ours and manager.parse_hookimpl_opts(plugin, hook) is None:
            raise PluginError(f"plugin {name!r}: {hook} has no @hookimpl, so it would never be called; decorate it")


def describe_arguments(error: pluggy.PluginValidationError) -> str:
    """Describe the arguments of a hook's implementation that the hook does not have."""
    text = " ".join(str(error).split()).rpartition(" hookimpl definition: ")[2]
    definition, _, unknown = text.partition(" Argument(s) ")
    return f"{definition}: the argument 'step' is now 'batch'" if unknown.startswith("{'step'}") else text


@functools.cache
def _hook_names() -> tuple[str, ...]:
    return tuple(sorted(name for name, function in vars(hookspecs).items() if hasattr(function, "plasmid_spec")))


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
