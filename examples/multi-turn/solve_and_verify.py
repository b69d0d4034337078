"""Fan-out: each rollout returns two samples, a solution and the policy's verdict on it, each with its own reward."""

from dataclasses import replace
from typing import Literal

import numpy as np
from plasmid import Prompt, Reward, Rollout, Sample, Score, hookimpl

SHOWN = "2+2=4 right\n2+2=5 wrong\n"
"""Example verdicts at the start of the second prompt."""


async def solve_and_verify(rollout: Rollout, prompt: Prompt, shown: str = SHOWN) -> list[Sample]:
    """Solve the prompt, then judge the solution in a second prompt."""
    solution = await rollout.generate(prompt.token_ids)
    said = rollout.decode(solution.token_ids).strip()
    solved = rollout.sample(prompt, [solution], metadata={"part": "solve", "said": said})

    question = prompt.text.strip().splitlines()[-1]
    asked = rollout.encode(f"{shown}{question}{said}")
    verdict = await rollout.generate(np.asarray(asked, np.int32), max_new_tokens=2)
    judged = rollout.sample(replace(prompt, token_ids=asked), [verdict], metadata={"part": "verify", "said": said})
    return [solved, judged]


class SolvedOrJudged(Reward):
    """1.0 for a correct solution or a correct verdict, else 0.0."""

    kind: Literal["solved-or-judged"] = "solved-or-judged"

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        is_right = sample.metadata["said"] == str(prompt.target)
        if sample.metadata["part"] == "solve":
            return Score(value=float(is_right), components={"solved": float(is_right)})
        verdict = sample.text.strip().split("\n")[0]
        fits = verdict == ("right" if is_right else "wrong")
        return Score(value=float(fits), components={"judged": float(fits)})


@hookimpl
def register_components():
    return [SolvedOrJudged]
