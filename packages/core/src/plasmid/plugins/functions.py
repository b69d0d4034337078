"""Functions that a recipe names: ``module:function`` or ``file.py:function``."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .module_file import import_file

HERE = "."
"""Modules are also searched in the current folder, as with ``python -m``."""


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function."""

    module: str
    """Name of a module, or path of a ``.py`` file."""
    function: str

    @staticmethod
    def parse(text: str) -> FunctionName:
        """Parse ``module:function`` or ``file.py:function``. Raises `ValueError`."""
        module, _, function = text.rpartition(":")
        if not module or not function.isidentifier():
            raise ValueError(f"must look like module:function or file.py:function, got {text!r}")
        return FunctionName(module, function)

    def load(self) -> Callable[..., Any]:
        """Import the module and return the function. Raises `ImportError`, or any error of the module."""
        module = self._from_file() if self.module.endswith(".py") else self._from_path()
        found = getattr(module, self.function, None)
        if not callable(found):
            raise ImportError(f"{self.module} has no function {self.function!r}")
        loaded: Callable[..., Any] = found
        return loaded

    def _from_path(self) -> object:
        import_from_working_folder()
        return importlib.import_module(self.module)

    def _from_file(self) -> object:
        path = Path(self.module)
        if not path.is_file():
            raise ImportError(f"no such file: {path}")
        name = "plasmid_functions_" + re.sub(r"\W", "_", str(path.absolute()))
        return import_file(path, name)


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a sync or async function from outside any event loop, and return its result."""
    result = function(**arguments)
    return asyncio.run(_as_coroutine(result)) if inspect.isawaitable(result) else result


async def _as_coroutine(result: Awaitable[Any]) -> Any:
    return await result


def import_from_working_folder() -> None:
    """Make modules in the current folder importable."""
    if HERE not in sys.path and "" not in sys.path:
        sys.path.append(HERE)
