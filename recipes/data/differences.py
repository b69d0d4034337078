"""An endless stream of differences of one-digit numbers, for the data source `function`."""

import random


def row(*, seed: int, index: int) -> dict[str, object]:
    """Return row ``index``; depends only on its arguments."""
    dice = random.Random(f"{seed} {index}")
    a, b = sorted((dice.randint(1, 9), dice.randint(1, 9)), reverse=True)
    return {"prompt": f"9-5=4\n{a}-{b}=", "target": a - b}
