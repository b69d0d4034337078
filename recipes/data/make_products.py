"""Writes products-train.jsonl and products-test.jsonl: products that a small language model has to compute by a tool.

Run it as ``python recipes/data/make_products.py [FOLDER]``; the files beside it are its output. Train and test share no
pair of numbers in either order.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import combinations
from pathlib import Path


def main(folder: Path) -> None:
    """Write both files."""
    draw = random.Random(0)
    pairs = list(combinations(range(11, 60), 2))
    draw.shuffle(pairs)
    for name, part in (("train", pairs[:200]), ("test", pairs[200:216])):
        rows = [{"prompt": f"What is {a} times {b}?", "target": a * b} for a, b in part]
        (folder / f"products-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
