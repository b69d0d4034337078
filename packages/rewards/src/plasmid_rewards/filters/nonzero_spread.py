"""Dynamic sampling: train on prompts that are neither too easy nor too hard yet."""

from __future__ import annotations

from typing import Literal

import numpy as np
from plasmid import Filter, PromptGroup
from pydantic import Field

from .finished import rewards


class NonzeroSpread(Filter):
    """Keeps groups whose samples have different rewards: in the others all advantages are zero.

    The dynamic sampling of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476). A group that was sampled once
    (`samples_per_prompt` = 1) has no spread by definition and is kept, because dropping it would drop every group.
    """

    kind: Literal["nonzero-spread"] = "nonzero-spread"
    tolerance: float = Field(1e-9, ge=0, allow_inf_nan=False)
    """Largest difference between highest and lowest reward that still counts as none."""

    def __call__(self, group: PromptGroup) -> bool:
        if len(group.samples) == 1:
            return True
        values = rewards(group)
        return len(values) > 1 and bool(np.ptp(values) > self.tolerance)
