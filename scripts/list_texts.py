"""List every text that the packages can show: string literals that contain a space, without docstrings.

Compare the output before and after a refactoring to find changed or missing messages:
``python scripts/list_texts.py > before.txt``. Values inserted at run time are shown as ``{}``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"


def texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of one file. Adjacent literals and the parts of an f-string form one text."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    inside -= {id(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) in inside or id(node) in docstrings:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)


def main() -> None:
    found = {
        text
        for file in PACKAGES.rglob("src/**/*.py")
        for text in texts(ast.parse(file.read_text()))
        if " " in text.strip() and not text.startswith("\n")
    }
    sys.stdout.write("".join(f"{text!r}\n" for text in sorted(found)))


if __name__ == "__main__":
    main()
