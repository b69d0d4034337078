"""Comparison of the rollouts of a prompt. N samples, R rollouts, G groups."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from plasmid.components import Needs
from plasmid.types.batch import BatchTable

from .policy_gradient import RewardPolicyGradient

if TYPE_CHECKING:
    from plasmid.components.objective_inputs import AdvantageInputs
    from torch import Tensor

F = NDArray[np.float64]


class GroupPolicyGradient(RewardPolicyGradient):
    """Base class of algorithms whose advantages compare the rollouts of a prompt.

    A subclass implements `compare` and `policy_loss`.
    """

    baseline: Literal["sample", "turn"] = "sample"
    """Quantity that is compared within a prompt group. sample: rewards of whole samples. turn: the return of each turn,
    that is the sum of the rewards from this turn on (Williams 1992), with the returns of the same turn in the other
    rollouts. Without rewards by turn both are equal."""

    @abstractmethod
    def compare(self, table: BatchTable) -> F:
        """Return the advantage [N] of each sample's reward in this table."""

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Return the advantage [T] of each token's sample or turn within its prompt group."""
        table = self.table(inputs)
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


@dataclass(frozen=True, slots=True, eq=False)
class RewardGroups:
    """Rewards of rollouts and their statistics by prompt group."""

    values: F
    """[R] mean reward over the samples of each rollout."""
    group: NDArray[np.int64]
    """[R] index of each rollout's group."""
    size: NDArray[np.int64]
    """[G] number of rollouts; 1 for empty groups."""
    mean: F
    """[G]"""
    rollout: NDArray[np.int64]
    """[N] index of each sample's rollout."""

    @classmethod
    def of(cls, table: BatchTable) -> RewardGroups:
        rollouts, rollout, counts = np.unique(table.rollout_index, return_inverse=True, return_counts=True)
        values = np.bincount(rollout, weights=table.rewards) / counts
        group = np.zeros(len(rollouts), np.int64)
        group[rollout] = table.group_index
        size = np.maximum(np.bincount(group), 1)
        mean = np.bincount(group, weights=values) / size
        return cls(values, group, size, mean, rollout)

    def std_of_others(self) -> F:
        """Return the sample standard deviation [R] of the group's other rollouts; 0 if they are equal or fewer than
        two.

        Loops over rollouts, because leave-one-out sums would give equal rewards a tiny nonzero deviation.
        """
        result = np.zeros(len(self.values))
        for rollout, group in enumerate(self.group):
            here = np.flatnonzero(self.group == group)
            others = self.values[here[here != rollout]]
            if len(others) > 1 and np.ptp(others) > 0:
                result[rollout] = others.std(ddof=1)
        return result


def leave_one_out_advantages(table: BatchTable) -> F:
    """Return advantages [N]: reward - mean of the prompt's other rollouts (Ahmadian et al. 2024, arXiv 2402.14740).

    The only rollout of a group has no baseline and gets 0.
    """
    groups = RewardGroups.of(table)
    size = groups.size[table.group_index]
    total = groups.mean[table.group_index] * size
    others = (total - groups.values[groups.rollout]) / np.maximum(size - 1, 1)
    return np.where(size > 1, table.rewards - others, 0.0)
