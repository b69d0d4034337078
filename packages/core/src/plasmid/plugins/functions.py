"""Functions that a recipe names: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .module_file import import_file

HERE = "."
"""Modules are looked for in the current folder, too, as by ``python -m``."""


@dataclass(frozen=True, slots=True)
class FunctionName:
    """A function by name."""

    module: str
    """Name of a module, or path of a file that ends in ``.py``."""
    function: str

    @staticmethod
    def parse(text: str) -> FunctionName:
        """Raises `ValueError` if the text names no function."""
        module, _, function = text.rpartition(":")
        if not module or not function.isidentifier():
            raise ValueError(f"must look like module:function or file.py:function, got {text!r}")
        return FunctionName(module, function)

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function. Raises `ImportError`, or whatever the module raises."""
        module = self._from_file() if self.module.endswith(".py") else self._from_path()
        found = getattr(module, self.function, None)
        if not callable(found):
            raise ImportError(f"{self.module} has no function {self.function!r}")
        loaded: Callable[..., Any] = found
        return loaded

    def _from_path(self) -> object:
        with_here()
        return importlib.import_module(self.module)

    def _from_file(self) -> object:
        path = Path(self.module)
        if not path.is_file():
            raise ImportError(f"no such file: {path}")
        name = "plasmid_functions_" + re.sub(r"\W", "_", str(path.absolute()))
        return import_file(path, name)


def with_here() -> None:
    """Let modules in the current folder be found."""
    if HERE not in sys.path and "" not in sys.path:
        sys.path.append(HERE)
