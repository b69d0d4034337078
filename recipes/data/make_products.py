"""Write products-train.jsonl and products-test.jsonl: products that a small language model computes with a tool.

Run it as ``python recipes/data/make_products.py [FOLDER]``; the files next to it are its output. Train and test share
no pair of numbers in either order. Each chat begins with solved questions: SmolLM2-135M-Instruct was not trained
on tool calls, and makes none without examples.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import combinations
from pathlib import Path

SOLVED = ((12, 15), (31, 14), (17, 52))


def chat(a: int, b: int) -> list[dict[str, str]]:
    """Return solved questions, and the one to answer."""
    messages = []
    for left, right in SOLVED:
        messages += [
            question(left, right),
            {"role": "assistant", "content": f'[calculate(expression="{left}*{right}")]'},
            {"role": "tool", "content": str(left * right)},
            {"role": "assistant", "content": f"It is {left * right}."},
        ]
    return [*messages, question(a, b)]


def question(a: int, b: int) -> dict[str, str]:
    """Return the message with a question."""
    return {"role": "user", "content": f"What is {a} times {b}?"}


def main(folder: Path) -> None:
    """Write both files."""
    draw = random.Random(0)
    pairs = [pair for pair in combinations(range(11, 60), 2) if not {pair, pair[::-1]} & set(SOLVED)]
    draw.shuffle(pairs)
    for name, part in (("train", pairs[:200]), ("test", pairs[200:216])):
        rows = [{"prompt": chat(a, b), "target": a * b} for a, b in part]
        (folder / f"products-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
