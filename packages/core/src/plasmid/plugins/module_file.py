"""Import Python files by path, among them plugin files. Worker processes load these without importing components."""

from __future__ import annotations

import builtins
import difflib
import dis
import functools
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from ..errors import PluginError, find_line, one_line

PLUGIN_FILE = "plasmid_plugin_"
"""Prefix of the names of modules that are plugin files."""
_plugin_names: dict[str, None] = {}
"""Module names of the plugin files that this process or its parent has imported, in import order."""


def check_names(module: ModuleType, path: Path) -> None:
    """Raise `NameError` for the first undefined global name in the functions of an imported file.

    Ignores functions that mention `NameError`, and names that a function assigns as ``global``.
    """
    assigned, used = _global_names(path.read_bytes())
    known = {*vars(module), *vars(builtins), *assigned}
    for name, line in used:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise NameError(f"line {line}: name {name!r} is not defined{hint}")


@functools.lru_cache(maxsize=32)
def _global_names(source: bytes) -> tuple[set[str], list[tuple[str, int | None]]]:
    """Return what the functions assign as ``global``, and each global name that they use with its line.

    Cached, because a process loads the same files for each configuration that it resolves.
    """
    assigned, used = set[str](), list[tuple[str, int | None]]()
    for code in _codes(compile(source, "plugin", "exec", dont_inherit=True)):
        ignored = "NameError" in code.co_names or code.co_name == "__annotate__"
        for step in dis.get_instructions(code):
            if step.opname == "STORE_GLOBAL":
                assigned.add(step.argval)
            elif step.opname == "LOAD_GLOBAL" and not ignored:
                used.append((step.argval, step.positions.lineno if step.positions else code.co_firstlineno))
    return assigned, used


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of nested functions and classes, but not of the file itself, which has already run."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


_ALONE = threading.RLock()


class _SourceLoader(SourceFileLoader):
    """Neither writes nor reads compiled files, whose check misses a change of the same size within the same second."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source, if it has changed since this process compiled it."""
        return _compile(self.get_data(self.path), self.path)


@functools.lru_cache(maxsize=32)
def _compile(source: bytes, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def import_file(path: Path, name: str, *, again: bool = False) -> ModuleType:
    """Import a ``.py`` file as the module ``name``. Returns an already imported one, unless ``again``.

    Only one thread imports at a time: pydantic looks names up in `sys.modules` when a class is defined, and must not
    find a module that another thread has just started to import. Raises any error of the file, and `NameError` if one
    of its functions uses an undefined name.
    """
    with _ALONE:
        if not again and name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path.absolute())))
        assert spec is not None and spec.loader is not None, "the name ends in .py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            check_names(module, path)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module


def load_file(path: Path, *, again: bool = True) -> ModuleType:
    """Import a plugin file; unless ``again``, only if this process has not imported it.

    Its module has the same name in every process of a run.
    """
    if not path.is_file():
        raise PluginError(f"plugins: no such file: {path}")
    name = PLUGIN_FILE + re.sub(r"\W", "_", path.stem)
    _plugin_names[name] = None
    if path.suffix != ".py":
        raise PluginError(f"plugins: {path} is not a Python file; its name must end in .py")
    try:
        with _ALONE:
            is_same_file = getattr(sys.modules.get(name), "__file__", None) == str(path.absolute())
            return import_file(path, name, again=again or not is_same_file)
    except (Exception, SystemExit) as error:  # boundary: anything may go wrong in a user's file
        raise PluginError(f"plugin file {path} cannot be loaded: {one_line(error)}{_line_in(path, error)}") from error


def loaded_files() -> list[ModuleType]:
    """Return the plugin files that this process has imported.

    Without a search of `sys.modules`: in a forked process, it would copy the memory of thousands of modules.
    """
    return [sys.modules[name] for name in list(_plugin_names) if name in sys.modules]


def _line_in(path: Path, error: BaseException) -> str:
    """Format the line of the file that raised; empty for syntax errors, whose message includes it."""
    line = find_line(path, error)
    return "" if line is None else f" (line {line})"
