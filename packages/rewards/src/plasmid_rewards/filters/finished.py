"""Which samples of a group filters look at."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from plasmid import PromptGroup, Sample, StopReason


def finished(group: PromptGroup) -> list[Sample]:
    """Samples whose rollout did not fail: only they are trained on."""
    return [sample for sample in group.samples if sample.stop_reason is not StopReason.ERROR]


def rewards(group: PromptGroup) -> NDArray[np.float64]:
    """[n] rewards of the `finished` samples."""
    return np.array([sample.reward for sample in finished(group)], np.float64)
