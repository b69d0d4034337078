"""Writes sums-train.jsonl and sums-test.jsonl, the task of `make train`: one-digit sums for a small language model.

Run it as ``python recipes/data/make_sums.py [FOLDER]``; the files beside it are its output.

Why each prompt begins with a solved sum: a policy learns only from prompts of which it gets some samples right and some
wrong. SmolLM2-135M-Instruct, sampled at temperature 1 (64 samples each), never answers a bare ``3+5=`` right, 11 % of
chats that ask "What is 3+5?", but 39 % after two solved sums; after one, as here, it starts at about 25 %.

Why the split is by unordered pair: who has been trained on 3+5 has as good as seen 5+3. So both orders of a pair are in
the same file, and a reward on the test file cannot come from remembering. The solved sum 2+2 is in neither.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

DIGITS = range(1, 10)
SHOWN = (2, 2)
TEST_FRACTION = 0.25
SEED = 0


def row(a: int, b: int) -> dict[str, object]:
    """One line of the files."""
    return {"prompt": f"2+2=4\n{a}+{b}=", "target": a + b, "a": a, "b": b}


def split() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Rows for training and rows for testing."""
    pairs = [(a, b) for a in DIGITS for b in DIGITS if a <= b and (a, b) != SHOWN]
    held_out = set(random.Random(SEED).sample(pairs, round(TEST_FRACTION * len(pairs))))
    sums = [(a, b) for a in DIGITS for b in DIGITS if (a, b) != SHOWN]
    train = [row(a, b) for a, b in sums if (min(a, b), max(a, b)) not in held_out]
    test = [row(a, b) for a, b in sums if (min(a, b), max(a, b)) in held_out]
    return train, test


def main(folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), split(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"sums-{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
