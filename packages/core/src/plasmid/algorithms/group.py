"""Baselines within prompt groups, by group id. N samples, R rollouts, G groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..batch import BatchTable

F = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rewards of rollouts and their statistics by group."""

    values: F
    """[R] mean reward of each rollout's samples."""
    groups: NDArray[np.int64]
    """[R]"""
    size: NDArray[np.int64]
    """[G] rollouts; 1 for groups without any."""
    mean: F
    """[G]"""
    rollout: NDArray[np.int64]
    """[N] which rollout each sample is of."""


def _groups(table: BatchTable) -> _Groups:
    rollouts, index, counts = np.unique(table.rollout_index, return_inverse=True, return_counts=True)
    values = np.bincount(index, weights=table.rewards) / counts
    groups = np.zeros(len(rollouts), np.int64)
    groups[index] = table.group_index
    size = np.maximum(np.bincount(groups), 1)
    mean = np.bincount(groups, weights=values) / size
    return _Groups(values, groups, size, mean, index)


def group_advantages(table: BatchTable, *, normalize_std: bool, std_eps: float) -> F:
    """[N] (reward - mean) / (std + std_eps) in each prompt group, or reward - mean (Dr. GRPO, arXiv 2503.20783).

    The statistics are those of rollouts: the samples of one rollout count once, with their mean reward. The standard
    deviation has the divisor n - 1, as in TRL, verl and slime; GRPO's paper (Shao et al. 2024, arXiv 2402.03300) leaves
    it open, and n (NumPy's default) gives advantages that are larger by sqrt(n / (n - 1)). A group of one rollout has
    no standard deviation and is only centred.
    """
    g = _groups(table)
    advantages = table.rewards - g.mean[table.group_index]
    if normalize_std:
        squares = np.bincount(g.groups, weights=(g.values - g.mean[g.groups]) ** 2)
        std = np.sqrt(squares / np.maximum(g.size - 1, 1))
        scale = np.where(g.size > 1, std + std_eps, 1.0)
        advantages = advantages / scale[table.group_index]
    return np.asarray(advantages, np.float64)


def leave_one_out_advantages(table: BatchTable) -> F:
    """[N] reward minus the mean of the other rollouts of the prompt (Ahmadian et al. 2024, arXiv 2402.14740).

    A rollout that is alone in its group has no baseline and gets 0.
    """
    g = _groups(table)
    size = g.size[table.group_index]
    total = g.mean[table.group_index] * size
    others = (total - g.values[g.rollout]) / np.maximum(size - 1, 1)
    return np.where(size > 1, table.rewards - others, 0.0)
