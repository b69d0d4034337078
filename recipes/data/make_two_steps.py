"""Write two-steps-train.jsonl and two-steps-test.jsonl: two-step arithmetic of reasoning-gym for a small model.

Run it as ``python recipes/data/make_two_steps.py [FOLDER]``; the files next to it are its output with reasoning-gym
0.1.25 (extra ``reasoning-gym`` of plasmid-rewards). Training reads only the files and does not need the package.

The expressions are those of the family ``chain_sum`` with three terms of one digit, such as ``8-5+2``. Expressions
with a term 0 are left out because one step solves them, and those with a negative result of either step.

Each prompt begins with two solved expressions whose first step is written out, such as ``8-4+3=4+3=7``, because a
policy learns only from prompts with both right and wrong samples. SmolLM2-135M-Instruct, sampled at temperature 1,
answers 7 % of the test prompts (4 samples each), and as many if the first step is not written out. In that form it
learned little, because it must add three numbers at once: 98 batches of 256 samples raised its reward from 0.10 to 0.2.

Test and training expressions differ in their terms, not only in the order of the terms: 2+8-5 in the training file
would be nearly the same as 8-5+2 in the test file.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SHOWN = ("2+3-1", "8-4+3")
NUM_TEST, NUM_TRAIN = 96, 768
SEED = 0
NUM_DRAWS = 8000


def terms(expression: str) -> tuple[int, ...]:
    """Return the signed terms of an expression."""
    return tuple(int(term) for term in re.findall(r"[+-]?\d+", expression))


def solve(expression: str) -> str:
    """Return the expression with its first step and its value: ``8-4+3=4+3=7``."""
    first, second, _ = terms(expression)
    return f"{expression}={first + second}{expression[3:]}={sum(terms(expression))}"


def row(expression: str) -> dict[str, object]:
    """Return one line of the files."""
    shown = "".join(f"{solve(solved)}\n" for solved in SHOWN)
    return {"prompt": f"{shown}{expression}=", "target": sum(terms(expression)), "expression": expression}


def expressions() -> Iterator[str]:
    """Return the distinct expressions of reasoning-gym that the task contains, in the order of its draws."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(
        "chain_sum", seed=SEED, size=NUM_DRAWS, min_terms=3, max_terms=3, min_digits=1, max_digits=1
    )
    shown = {tuple(sorted(terms(solved))) for solved in SHOWN}
    seen = set()
    for entry in drawn:
        expression = entry["metadata"]["expression"].replace(" ", "")
        values = terms(expression)
        assert sum(values) == int(entry["answer"])
        negative = sum(values[:2]) < 0 or sum(values) < 0
        if 0 in values or negative or tuple(sorted(values)) in shown or expression in seen:
            continue
        seen.add(expression)
        yield expression


def split() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Return the rows for training and for testing."""
    drawn = list(expressions())
    groups = sorted({tuple(sorted(terms(expression))) for expression in drawn})
    held_out = set(random.Random(SEED).sample(groups, NUM_TEST))
    test: dict[tuple[int, ...], str] = {}
    train = []
    for expression in drawn:
        group = tuple(sorted(terms(expression)))
        if group in held_out:
            test.setdefault(group, expression)
        else:
            train.append(expression)
    return [row(expression) for expression in train[:NUM_TRAIN]], [row(expression) for expression in test.values()]


def main(folder: Path) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), split(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"two-steps-{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
