"""A workflow whose completions have log-normal lengths: a random model would end none, or all of them early."""

import math
import random


async def run(rollout, prompt, *, median, sigma):
    """Sample one completion; its length is drawn from the rollout's id, so every run draws the same lengths."""
    draw = random.Random(rollout.id)
    length = max(1, round(median * math.exp(sigma * draw.gauss(0.0, 1.0))))
    completion = await rollout.generate(prompt.token_ids, max_new_tokens=length)
    return rollout.sample(prompt, [completion])
