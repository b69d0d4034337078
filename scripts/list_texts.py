"""List every text that the packages can show: string literals with a space in them, docstrings excluded.

Compare the output before and after a change of structure to find a message that changed or got lost:
``python scripts/list_texts.py > before.txt``. Parts that are filled in at run time are written as ``{}``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(__file__).parent.parent / "packages"


def texts(tree: ast.Module) -> Iterator[str]:
    """The texts of one file; adjacent literals are one text, and so are the branches of an f-string."""
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
