"""Code shared by trainers exists once, in `plasmid_training`; a backend's package contains only its own."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent.parent / "packages"
BACKENDS = ("backend-fsdp", "backend-megatron")
BLOCK = 6
"""Number of consecutive lines that must match to count as shared."""
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text):
    """Return the lines of a file without indentation, blank lines, comments, docstrings and imports."""
    found, left_out = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, node.end_lineno + 1))
    lines = text.splitlines()
    return [lines[number - 1].strip() for number in sorted(found - left_out)]


def files_of(package):
    return [code_lines(path.read_text()) for path in sorted((PACKAGES / package).glob("src/**/*.py"))]


def blocks(lines):
    return [tuple(lines[first : first + BLOCK]) for first in range(len(lines) - BLOCK + 1)]


def shared(files, others):
    """Return the lines of ``files`` in blocks that also occur in ``others``."""
    theirs = {block for lines in others for block in blocks(lines)}
    count = 0
    for lines in files:
        first_lines = [first for first, block in enumerate(blocks(lines)) if block in theirs]
        count += len({first + offset for first in first_lines for offset in range(BLOCK)})
    return count


def test_shared_lines_are_counted_in_whole_blocks():
    text = "import os\n" + "\n".join(f"line{i} = {i}  # said\n" for i in range(8)) + '"""Said."""\n'
    lines = code_lines(text)
    assert len(lines) == 8
    other = [*lines[1:7], "end = 1"]
    assert shared([lines], [other]) == 6 and shared([other], [lines]) == 6
    assert shared([lines], [lines[:5]]) == 0


@pytest.mark.parametrize("package", BACKENDS)
def test_trainers_share_by_the_training_folder_and_not_by_copies(package):
    own = files_of(package)
    (other,) = (files_of(name) for name in BACKENDS if name != package)
    assert shared(own, other) < 0.05 * sum(map(len, own))


@pytest.mark.parametrize("package", ["core", "runtime", "training", "serving"])
def test_a_shared_package_names_no_backend(package):
    """Names of backends and of their formats are values in plugins."""
    named = [
        str(path)
        for path in (PACKAGES / package).glob("src/**/*.py")
        if re.search("sglang|vllm|fsdp|megatron", path.read_text().lower())
    ]
    assert named == []
