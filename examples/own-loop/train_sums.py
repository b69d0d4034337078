"""Train SmolLM2-135M-Instruct on sums in a custom loop: python examples/own-loop/train_sums.py [key=value ...]

Uses the recipe of `make train`, and adds two things that a recipe cannot express: partial credit for answers that are
nearly right, and no training on prompts whose samples all have the same reward. Run it from the repository's root.
"""

import re
import sys
from dataclasses import replace

import numpy as np
import plasmid

NEAR = 0.2
"""Maximum reward of a wrong answer."""


def with_partial_credit(group: plasmid.GroupRef) -> plasmid.GroupRef:
    """Return the group with a reward of up to `NEAR` for wrong answers, which decreases with the error."""
    whole = group.whole.get()
    rewards = group.rewards.copy()
    for index, sample in enumerate(whole.samples):
        found = re.search(r"\d+", sample.text)
        if found and rewards[index] < 1:
            rewards[index] = NEAR / (1 + abs(int(found[0]) - int(whole.prompt.target)))
    return replace(group, rewards=rewards)


def main() -> None:
    """Train, and print one line per batch."""
    recipe = "recipes/smollm2-sums-cpu.toml"
    config = plasmid.load_config(recipe, ["trackers=[]", "run.dir=auto", *sys.argv[1:]])
    with plasmid.open(config, progress=False) as session:
        while groups := session.sample():
            right = np.mean([group.rewards == 1 for group in groups])
            groups = [with_partial_credit(group) for group in groups]
            groups = [group for group in groups if np.ptp(group.rewards) > 0] or groups[:1]
            session.score(groups)
            session.train(groups)
            metrics = session.publish()
            print(f"batch {session.batch}: {right:.0%} right, {len(groups)} groups, loss {metrics['train/loss']:.4f}")
    print(session.run_dir)


if __name__ == "__main__":
    main()
