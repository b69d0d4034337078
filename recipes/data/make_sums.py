"""Write sums-train.jsonl and sums-test.jsonl, the task of `make train`: one-digit sums for a small language model.

Run it as ``python recipes/data/make_sums.py [FOLDER]``; the files next to it are its output.

Each prompt begins with a solved sum, because a policy learns only from prompts with both right and wrong samples.
SmolLM2-135M-Instruct, sampled at temperature 1 (64 samples each), answers 0 % of bare ``3+5=`` prompts, 11 % of chats
"What is 3+5?", and 39 % of prompts with two solved sums; with one, as here, it starts at about 25 %.

Both orders of a pair are in the same file: 5+3 in the test file would be nearly the same as 3+5 in the training file,
and memorizing must not increase the test reward. The solved sum 2+2 is in neither file.
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
    """Return one line of the files."""
    return {"prompt": f"2+2=4\n{a}+{b}=", "target": a + b, "a": a, "b": b}


def split() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return the rows for training and for testing."""
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
