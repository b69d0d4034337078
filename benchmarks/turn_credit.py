"""Compare the held-out rewards of a tiny model trained with credit per turn and with credit per sample.

    python benchmarks/turn_credit.py --out benchmarks/results/turn-credit-cpu.json

In the first turn the policy draws a card of random value, which it cannot learn. Then the environment asks 8 questions,
each one character: a digit must be answered with a digit and a letter with a letter. Both runs of a seed use the same
recipe with GRPO, except for `algorithm.baseline`. The model is random (two layers, 130,000 parameters). Evaluation uses
prompts that training does not, and cards of value 0.
"""

import argparse
import json
import random
import string
import tempfile
from pathlib import Path
from typing import Literal

import torch
import transformers
from plasmid import hookimpl
from plasmid.components.interaction import Environment, Step
from plasmid.config.load import resolve
from plasmid_models.testing import make_tiny_model
from plasmid_runtime.cluster.local import LocalCluster
from plasmid_runtime.lifecycle.session import run

QUESTIONS, TRAINING, HELD_OUT = 8, 256, 32
BATCHES, EVERY = 40, 5
SEEDS = (0, 1, 2)
BASELINES = ("turn", "sample")


class Kinds(Environment):
    """Draws a card, then asks each character in the column ``questions``, and expects one of the same kind."""

    kind: Literal["kinds"] = "kinds"
    isolated = False
    card: float = 1.0
    """Maximum value of a card; the minimum is its negative."""

    def episode(self):
        return KindsEpisode(self.card)


class KindsEpisode:
    """A card, and one question per turn; each right answer earns an equal part of 1."""

    def __init__(self, card):
        self.card = card

    async def reset(self, seed, prompt):
        self.questions, self.turn = prompt.metadata["questions"], 0
        return "card:"

    async def step(self, action):
        if self.turn == 0:
            reward = self.card * random.Random(f"{self.questions} {action}").uniform(-1, 1)
        else:
            right = action.isalnum() and action.isdigit() == self.questions[self.turn - 1].isdigit()
            reward = right / len(self.questions)
        following = self.questions[self.turn : self.turn + 1]
        self.turn += 1
        return Step(observation=following, reward=reward, done=not following)

    async def close(self):
        pass


@hookimpl
def register_components():
    return [Kinds]


def write_rows(folder):
    """Write the prompts of training and evaluation, all different."""
    draw, rows = random.Random(0), dict[str, None]()
    while len(rows) < TRAINING + HELD_OUT:
        kinds = draw.choices((string.digits, string.ascii_lowercase), k=QUESTIONS)
        rows["".join(map(draw.choice, kinds))] = None
    lines = [json.dumps({"prompt": "kinds, ", "questions": row}) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines[:TRAINING]))
    (folder / "held-out.jsonl").write_text("".join(lines[TRAINING:]))


def recipe(folder, model, *, baseline, seed, batches):
    """Return the recipe of one run as plain data."""

    def rows(name):
        return {"path": str(folder / f"{name}.jsonl"), "target_key": "none"}

    def workflow(card):
        return {
            "kind": "environment",
            "max_turns": 1 + QUESTIONS,
            "observation_format": "{observation}",
            "environment": {"kind": "kinds", "card": card},
        }

    held_out = {"name": "held-out", "data": rows("held-out"), "workflow": workflow(0.0), "samples_per_prompt": 2}
    return {
        "recipe": "turn-credit",
        "plugins": [__file__],
        "model": {"path": str(model)},
        "run": {
            "dir": str(folder / f"{baseline}-{seed}"),
            "seed": seed,
            "batches": batches,
            "prompts_per_batch": 4,
            "samples_per_prompt": 8,
        },
        "sampling": {"max_new_tokens": 1},
        "data": rows("train"),
        "workflow": workflow(1.0),
        "trainer": {"kind": "fsdp", "lr": 3e-3},
        "rollout": {"kind": "hf"},
        "algorithm": {"kind": "grpo", "baseline": baseline},
        "rewards": [{"kind": "environment"}],
        "eval": [{**held_out, "every": EVERY}],
        "checkpoint": {"at_end": False, "export": False},
    }


def curves(folder, seed, batches=BATCHES):
    """Train both runs of a seed and return their held-out rewards, before training and after every 5 batches."""
    folder.mkdir()
    write_rows(folder)
    model = make_tiny_model(folder / "model", seed=seed)
    found = {}
    for baseline in BASELINES:
        config = resolve(recipe(folder, model, baseline=baseline, seed=seed, batches=batches))
        result = run(config, make_cluster=lambda _: LocalCluster())
        found[baseline] = [round(reward, 4) for _, reward in result.evaluations["held-out"]]
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    report = {
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, CPU",
        "every": EVERY,
        "curves": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            report["curves"][seed] = curves(Path(folder) / str(seed), seed, args.batches)
            for baseline, rewards in report["curves"][seed].items():
                print(f"seed {seed}, {baseline:6}: {' '.join(f'{reward:.2f}' for reward in rewards)}", flush=True)
            if args.out:
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
