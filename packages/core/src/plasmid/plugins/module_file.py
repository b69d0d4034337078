"""Python files that are named by their path, and no installed module."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType

_ALONE = threading.RLock()


def import_file(path: Path, name: str, *, again: bool = False) -> ModuleType:
    """Run the file, a ``.py``, as the module ``name``; one that has run already is returned as it is, unless ``again``.

    One thread at a time: who defines a class looks names up in `sys.modules` (pydantic does), and must find its own
    module there, not one that another thread has just begun. Raises whatever the file raises.
    """
    with _ALONE:
        if not again and name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "the name ends in .py"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module
