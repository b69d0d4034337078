"""Baselines within prompt groups. N samples, R rollouts, G groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from plasmid.components import Needs, RecipeView, Settings
from plasmid.types.batch import BatchTable
from pydantic import Field

from .policy_gradient import RewardPolicyGradient

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs
    from torch import Tensor

F = NDArray[np.float64]
StdForm = Literal["sample", "population", "leave-one-out"]


class GroupBaseline(Settings):
    """Settings and advantages of algorithms that compare the rollouts of a prompt; by default with their mean."""

    baseline: Literal["sample", "turn"] = "sample"
    """Quantity that is compared within a prompt group. sample: rewards of whole samples. turn: the return of each turn,
    that is the sum of the rewards from this turn on (Williams 1992), with the returns of the same turn in the other
    rollouts. Without rewards by turn both are equal."""

    def compare(self, table: BatchTable) -> F:
        """Return the advantage [N] of each sample's reward in this table."""
        return group_advantages(table, normalize_std=False)

    def relative_rewards(self, inputs: AdvantageInputs, table: BatchTable) -> Tensor:
        """Return the advantage [T] of each token's sample or turn within its prompt group."""
        if self.baseline == "sample" or table.turn_rewards is None or inputs.turn_index is None:
            return inputs.spread(self.compare(table))
        turns = self._compare_turns(table)
        index = inputs.sample_index.cpu().numpy(), inputs.turn_index.cpu().numpy()
        return inputs.rollout_logprobs.new_tensor(turns[index])

    def _compare_turns(self, table: BatchTable) -> F:
        """Return advantages [N, K] of turns. The rest of a sample's reward belongs to its last turn, so that it is part
        of the return of every turn."""
        assert table.turn_rewards is not None
        is_turn = ~np.isnan(table.turn_rewards)
        rewards = np.nan_to_num(table.turn_rewards)
        after = np.cumsum(rewards[:, ::-1], 1)[:, ::-1] + (table.rewards - rewards.sum(1))[:, None]
        advantages: F = np.zeros_like(after)
        for turn in range(after.shape[1]):
            here = np.flatnonzero(is_turn[:, turn])
            same = replace(
                table,
                sample_ids=tuple(table.sample_ids[i] for i in here),
                group_index=table.group_index[here],
                rollout_index=table.rollout_index[here],
                rewards=after[here, turn],
            )
            advantages[here, turn] = self.compare(same)
        return advantages


class GroupNormalization(GroupBaseline):
    """Advantages (r - mean) / (std + std_eps) within a prompt group, with settings of the division."""

    normalize_std: bool = True
    """Divide advantages by the standard deviation of their prompt group; Dr. GRPO does not."""
    std_form: StdForm = "sample"
    """Standard deviation of a group of n rollouts. sample: divisor n - 1. population: divisor n. leave-one-out: mean
    and standard deviation of the other rollouts only, without division if there are fewer than two others or their
    rewards are equal (as in NeMo-RL)."""
    std_eps: float = Field(1e-6, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name, shown in (("std_eps", f"{self.std_eps:g}"), ("std_form", repr(self.std_form))):
            if not self.normalize_std and self._is_set(name):
                yield f"{name} = {shown} has no effect with normalize_std = false; remove it"

    def compare(self, table: BatchTable) -> F:
        return group_advantages(table, normalize_std=self.normalize_std, std_eps=self.std_eps, std_form=self.std_form)


class GroupPolicyGradient(RewardPolicyGradient):
    """Base class of algorithms that train on the advantages of a `GroupBaseline`, which must be an earlier base."""

    @abstractmethod
    def relative_rewards(self, inputs: AdvantageInputs, table: BatchTable) -> Tensor:
        """Implemented by `GroupBaseline`."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        return self.relative_rewards(inputs, self.table(inputs))


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rewards of rollouts and their statistics by group."""

    values: F
    """[R] mean reward over the samples of each rollout."""
    groups: NDArray[np.int64]
    """[R]"""
    size: NDArray[np.int64]
    """[G] number of rollouts; 1 for empty groups."""
    mean: F
    """[G]"""
    rollout: NDArray[np.int64]
    """[N] index of each sample's rollout."""


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
    """Return advantages [N]: (reward - mean) / (std + std_eps) of the group, or reward - mean (Dr. GRPO, 2503.20783).

    Statistics are over rollouts: the samples of one rollout count once, with their mean reward. The ``sample`` standard
    deviation has the divisor n - 1, as in TRL, verl and slime; GRPO's paper (Shao et al. 2024, arXiv 2402.03300) does
    not specify it. The divisor n (``population``, NumPy's default) gives advantages larger by sqrt(n / (n - 1)). With
    ``leave-one-out``, mean and standard deviation are those of the other rollouts, as in NeMo-RL. Advantages are only
    centered for a group of one rollout, and with ``leave-one-out`` for fewer than two others or equal rewards.
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
    """Return the sample standard deviation [R] of the group's other rollouts; 0 if they are equal or fewer than two.

    Loops over rollouts, because leave-one-out sums would give equal rewards a tiny nonzero deviation.
    """
    result = np.zeros(len(g.values))
    for rollout, group in enumerate(g.groups):
        here = np.flatnonzero(g.groups == group)
        others = g.values[here[here != rollout]]
        if len(others) > 1 and np.ptp(others) > 0:
            result[rollout] = others.std(ddof=1)
    return result


def leave_one_out_advantages(table: BatchTable) -> F:
    """Return advantages [N]: reward - mean of the prompt's other rollouts (Ahmadian et al. 2024, arXiv 2402.14740).

    The only rollout of a group has no baseline and gets 0.
    """
    g = _groups(table)
    size = g.size[table.group_index]
    total = g.mean[table.group_index] * size
    others = (total - g.values[g.rollout]) / np.maximum(size - 1, 1)
    return np.where(size > 1, table.rewards - others, 0.0)
