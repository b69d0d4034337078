"""Count lines of code in packages/: without blank lines, comments and docstrings.

    python scripts/count_code.py            a table by package, and by subpackage for core
    python scripts/count_code.py --json     the same as JSON

Strings below attributes also count as docstrings.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Return the number of lines with code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def count(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the lines by package and subpackage ("." for its root)."""
    result: dict[str, dict[str, int]] = {}
    for package in sorted((root / "packages").iterdir()):
        subpackages: Counter[str] = Counter()
        for path in sorted(package.glob("src/*/**/*.py")):
            inside = path.relative_to(package / "src").parts[1:]
            subpackages[inside[0] if len(inside) > 1 else "."] += code_lines(path.read_text())
        if subpackages:
            result[package.name] = dict(sorted(subpackages.items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = count()
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    for package, subpackages in found.items():
        print(f"{package:<18}{sum(subpackages.values()):>7}")
        for name, lines in subpackages.items() if package == "core" else ():
            print(f"  {name:<16}{lines:>7}")
    print(f"{'total':<18}{sum(sum(lines.values()) for lines in found.values()):>7}")


if __name__ == "__main__":
    main()
