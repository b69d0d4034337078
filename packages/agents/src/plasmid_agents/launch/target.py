"""Checks that a function which a recipe names exists, without running any of its module's code."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from plasmid.plugins.functions import FunctionName, with_here


def check_function(name: FunctionName) -> None:
    """Raises `ValueError` if there is no such function, as far as the source tells."""
    source = _source(name.module)
    if source is None:
        return  # a compiled module
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"{name.module} cannot be read: {error}") from None
    names = _bound(tree)
    if name.function not in names and "*" not in names:
        raise ValueError(f"{name.module} has no {name.function!r}; it has {', '.join(sorted(names)) or 'nothing'}")


def _source(module: str) -> Path | None:
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise ValueError(f"no such file: {module}")
        return Path(module)
    with_here()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ValueError(
            f"there is no module {module!r}, neither installed nor in the current folder; "
            "name a file as path/to/file.py:function"
        )
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _bound(tree: ast.Module) -> set[str]:
    """Names that the top level of a module defines or imports; ``*`` where only running it would tell."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif not isinstance(node, ast.Expr):
            names.add("*")
    return names
