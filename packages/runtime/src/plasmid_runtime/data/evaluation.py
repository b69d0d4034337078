"""Statistics of an evaluation set."""

from __future__ import annotations

import numpy as np
from plasmid.types.batch import GroupRef


def count_passed(group: GroupRef, threshold: float) -> tuple[int, int]:
    """Return the number of rollouts of a group, and how many of them passed.

    A rollout passes if its mean reward is at least ``threshold``. Failed rollouts do not pass.
    """
    rewards = group.rollout_rewards()
    return len(rewards) + len(group.errors), int((rewards >= threshold).sum())


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` samples passes, without bias.

    ``1 - C(n - c, k) / C(n, k)`` of Chen et al. 2021 (https://arxiv.org/abs/2107.03374), as the product of
    ``1 - k / i`` for i = n - c + 1 .. n, whose terms are all in [0, 1]. Raises `ValueError` unless 1 <= k <= n.
    """
    if not 0 <= num_passed <= num_samples:
        raise ValueError(f"num_passed must be between 0 and {num_samples}, got {num_passed}")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and {num_samples}, got {k}")
    if num_samples - num_passed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))
