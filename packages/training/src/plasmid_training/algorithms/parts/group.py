"""Baselines within prompt groups, by group id. N samples, R rollouts, G groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from plasmid.components import Settings
from plasmid.types.batch import BatchTable
from pydantic import Field

F = NDArray[np.float64]
StdForm = Literal["sample", "population", "leave-one-out"]


class GroupNormalization(Settings):
    """Settings of rewards relative to their prompt group."""

    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group; off in Dr. GRPO."""
    std_form: StdForm = "sample"
    """Standard deviation with the divisor n - 1, with n, or, together with the mean, of the other rollouts alone; of
    fewer than two others, or equal ones, there is none and nothing is divided (NeMo-RL)."""
    std_eps: float = Field(1e-6, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for name, shown in (("std_eps", f"{self.std_eps:g}"), ("std_form", repr(self.std_form))):
            if not self.normalize_std and self._is_set(name):
                yield f"{name} = {shown} is never read with normalize_std = false; remove it"

    def normalize(self, table: BatchTable) -> F:
        """[N] (r - mean) / (std + std_eps) over the rollouts of each prompt."""
        return group_advantages(table, normalize_std=self.normalize_std, std_eps=self.std_eps, std_form=self.std_form)


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


def group_advantages(
    table: BatchTable, *, normalize_std: bool, std_eps: float = 1.0, std_form: StdForm = "sample"
) -> F:
    """[N] (reward - mean) / (std + std_eps) in each prompt group, or reward - mean (Dr. GRPO, arXiv 2503.20783).

    The statistics are those of rollouts: the samples of one rollout count once, with their mean reward. A ``sample``
    standard deviation has the divisor n - 1, as in TRL, verl and slime; GRPO's paper (Shao et al. 2024, arXiv
    2402.03300) leaves it open, and n (``population``, NumPy's default) gives advantages that are larger by
    sqrt(n / (n - 1)). With ``leave-one-out`` mean and deviation are those of the other rollouts, as in NeMo-RL.
    Where there is no deviation (a group of one rollout; left out: fewer than two others, or equal ones) advantages are
    only centred.
    """
    g = _groups(table)
    if normalize_std and std_form == "leave-one-out":
        std = _std_of_others(g)[g.rollout]
        return np.asarray(leave_one_out_advantages(table) / np.where(std > 0, std + std_eps, 1.0), np.float64)
    advantages = table.rewards - g.mean[table.group_index]
    if normalize_std:
        squares = np.bincount(g.groups, weights=(g.values - g.mean[g.groups]) ** 2)
        std = np.sqrt(squares / np.maximum(g.size - (std_form == "sample"), 1))
        scale = np.where(g.size > 1, std + std_eps, 1.0)
        advantages = advantages / scale[table.group_index]
    return np.asarray(advantages, np.float64)


def _std_of_others(g: _Groups) -> F:
    """[R] of the group's other rollouts, divisor one less than their number; 0 where they are equal or fewer than two.

    One after another, because sums that leave one out would turn others that are equal into a tiny deviation.
    """
    result = np.zeros(len(g.values))
    for rollout, group in enumerate(g.groups):
        here = np.flatnonzero(g.groups == group)
        others = g.values[here[here != rollout]]
        if len(others) > 1 and np.ptp(others) > 0:
            result[rollout] = others.std(ddof=1)
    return result


def leave_one_out_advantages(table: BatchTable) -> F:
    """[N] reward minus the mean of the other rollouts of the prompt (Ahmadian et al. 2024, arXiv 2402.14740).

    A rollout that is alone in its group has no baseline and gets 0.
    """
    g = _groups(table)
    size = g.size[table.group_index]
    total = g.mean[table.group_index] * size
    others = (total - g.values[g.rollout]) / np.maximum(size - 1, 1)
    return np.where(size > 1, table.rewards - others, 0.0)
