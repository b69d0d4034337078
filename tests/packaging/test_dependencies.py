"""Every package requires exactly the packages of this repository that it imports."""

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = {
    next(p.name for p in (file.parent / "src").iterdir() if p.name.startswith("plasmid")): file
    for file in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def distribution(module: str) -> str:
    return "plasmid-core" if module == "plasmid" else module.replace("_", "-")


def asked_for(package: str) -> set[str]:
    project = tomllib.loads(PROJECTS[package].read_text())["project"]
    names = {text.partition("==")[0].partition("[")[0] for text in project["dependencies"]}
    return {name for name in names if name.startswith("plasmid-")}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements, except those for type checkers only. Expressions, which are most of the nodes, contain no
    imports."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        yield child
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            child.body.clear()
        yield from statements(child)


@functools.cache
def imported(package: str) -> set[str]:
    """Return the packages of this repository that are imported when the code runs, without imports for type checkers
    only."""
    found = set()
    for file in (PROJECTS[package].parent / "src").rglob("*.py"):
        tree = ast.parse(file.read_text())
        for node in statements(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            found |= {module.partition(".")[0] for module in modules}
    return {distribution(module) for module in found & set(PROJECTS) - {package}}


def with_all_below(names: set[str]) -> set[str]:
    found, todo = set(names), list(names)
    while todo:
        name = todo.pop()
        (package,) = (p for p in PROJECTS if distribution(p) == name)
        more = asked_for(package) - found
        found |= more
        todo += more
    return found


@pytest.mark.parametrize("package", PROJECTS)
def test_a_package_requires_what_it_imports(package):
    missing = imported(package) - with_all_below(asked_for(package))
    assert not missing


@pytest.mark.parametrize("package", PROJECTS)
def test_a_package_requires_only_what_it_imports(package):
    assert asked_for(package) <= imported(package)
