"""The tables of attacks and the tests of this folder refer to each other."""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
TOP = FOLDER.parents[1]
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
ROWS = 120
"""Minimum number of attacks."""


def rows():
    """Yield file and line of each row of a table, without its header."""
    for path in sorted((FOLDER / "attacks").glob("*.md")):
        lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
        assert lines, f"{path.name}: has no table"
        assert [cell.strip() for cell in lines[0].strip("|").split("|")][-1] == "test", f"{path.name}: {lines[0]}"
        yield from ((path.name, line) for line in lines[2:])


def names_of_tests(path):
    tree = ast.parse(path.read_text())
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(tree) if isinstance(node, functions) and node.name.startswith("test_")}


def test_every_attack_names_tests_that_exist():
    unnamed, missing = [], []
    for name, line in rows():
        found = NAMED.findall(line)
        if not found:
            unnamed.append(f"{name}: {line}")
        for file, test in found:
            if not (TOP / file).is_file() or test not in names_of_tests(TOP / file):
                missing.append(f"{name}: {file}::{test}")
    assert not unnamed
    assert not missing


def test_every_test_of_this_folder_is_in_a_table():
    named = {found for _, line in rows() for found in NAMED.findall(line)}
    files = sorted(path for path in FOLDER.glob("test_*.py") if path != Path(__file__))
    there = {(str(path.relative_to(TOP)), test) for path in files for test in names_of_tests(path)}
    unnamed = sorted(there - named)
    assert not unnamed


def test_the_audit_names_tests_that_exist():
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", (TOP / "docs/design/safety-audit.md").read_text())
    assert len(found) > 60
    missing = [f"{file}::{test}" for file, test in found if test not in names_of_tests(TOP / "tests" / file)]
    assert not missing


def test_there_are_as_many_attacks_as_are_promised():
    assert len(list(rows())) >= ROWS
