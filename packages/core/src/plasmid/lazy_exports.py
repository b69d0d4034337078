"""Names that a package exports without importing the modules that define them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def export_lazily(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that exports ``names``, by the submodule that defines them.

    A submodule is imported when one of its names is first used.
    """
    modules = {name: f"{package}.{module}" for module, defined in names.items() for name in defined}
    own = vars(import_module(package))

    def get_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        own[name] = getattr(import_module(modules[name]), name)
        return own[name]

    def list_names() -> list[str]:
        return sorted({*own, *modules})

    return get_name, list_names
