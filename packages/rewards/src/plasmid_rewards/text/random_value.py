"""A reward that means nothing, for trying out everything else."""

from __future__ import annotations

import hashlib
from typing import Literal

from plasmid import Prompt, Reward, Sample


class Random(Reward):
    """Uniform in [0, 1). The same sample id always gets the same value, on every machine."""

    kind: Literal["random"] = "random"
    seed: int = 0
    """Another seed gives other values."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        digest = hashlib.blake2b(f"{self.seed}:{sample.id}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "big") >> 11) / 2**53
