"""``module:function`` and ``file.py:function``: checked without running anything, found when it is to run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = "."
"""Modules are looked for in the run's folder, too, as by ``python -m``."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function by name."""

    module: str
    """Name of a module, or path of a file."""
    function: str

    @staticmethod
    def parse(text: str) -> Target:
        """Raises `ValueError` if the text is none."""
        module, colon, function = text.rpartition(":")
        if not colon or not module or not function.isidentifier():
            raise ValueError(f"must look like module:function or file.py:function, got {text!r}")
        return Target(module, function)

    @property
    def is_file(self) -> bool:
        """True if the module is given by its path."""
        return self.module.endswith(".py")

    def check(self) -> None:
        """Raises `ValueError` if there is no such function. The module's own code is not run."""
        source = self._source()
        if source is None:
            return  # a compiled module
        try:
            tree = ast.parse(source.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.module} cannot be read: {error}") from None
        names = _bound(tree)
        if self.function not in names and "*" not in names:
            raise ValueError(f"{self.module} has no {self.function!r}; at its top level are {', '.join(sorted(names))}")

    def _source(self) -> Path | None:
        if self.is_file:
            if not Path(self.module).is_file():
                raise ValueError(f"no such file: {self.module}")
            return Path(self.module)
        with_here()
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            raise ValueError(
                f"there is no module {self.module!r}, neither installed nor in the current folder; "
                "name a file as path/to/file.py:function"
            )
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function. Raises whatever the module raises."""
        if not self.is_file:
            with_here()
            return _function(importlib.import_module(self.module), self.function)
        path = Path(self.module)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.absolute()))  # what lies beside it can be imported, as by `python file.py`
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return _function(module, self.function)


def with_here() -> None:
    """Let modules in the current folder be found."""
    if HERE not in sys.path and "" not in sys.path:
        sys.path.append(HERE)


def _function(module: object, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise TypeError(f"{name} is no function")
    return function


def _bound(tree: ast.Module) -> set[str]:
    """Names that the top level of a module defines or imports; ``*`` for an import of everything."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If | ast.Try):
            names.add("*")
    return names
