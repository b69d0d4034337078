"""Compute metrics of a batch's rollouts and optimizer steps, named ``area/name``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from plasmid.types.batch import COUNTS, GroupRef

LAST = frozenset({"train/lr", "train/critic_lr", "train/step"})
"""Gauges, for which the value of the last optimizer step is reported, not the mean."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean with its count, so that means of parts of different sizes can be added."""

    total: float = 0.0
    count: float = 0.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean; nan if nothing was counted."""
        return self.total / self.count if self.count else float("nan")


def rollout_metrics(groups: Sequence[GroupRef], *, version: int) -> dict[str, float]:
    """Compute rewards, lengths, failures and staleness of scored groups, as ``reward/...`` and ``rollout/...``.

    Means are over samples, except staleness: over groups with generated tokens. ``rollout/failed`` is the fraction of
    failed samples. ``rollout/tokens`` and ``rollout/length_mean`` count the tokens after the prompt. Dropped groups are
    included, and also counted under ``rollout/dropped/<kind>``. ``rollout/turns_mean`` and ``rollout/calls_mean`` are
    means over rollouts, ``rollout/failed_calls`` is the fraction of failed calls. For mixtures,
    ``reward/source/<name>`` is the mean reward of a source, and ``rollout/source/<name>`` its fraction of the groups.
    Means over nothing are omitted.
    """
    rewards = np.concatenate([np.zeros(0), *(g.rewards for g in groups)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(g.lengths - g.prompt_lengths for g in groups)])
    num_failed = sum(len(g.errors) for g in groups)
    metrics: dict[str, float] = {}
    if len(rewards):
        metrics |= {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "rollout/length_mean": float(lengths.mean()),
            "rollout/truncated": float(np.concatenate([g.truncated for g in groups]).mean()),
        }
    if len(rewards) + num_failed:
        metrics["rollout/failed"] = num_failed / (len(rewards) + num_failed)
        metrics["rollout/tokens"] = float(lengths.sum())
    staleness = [version - g.oldest_version for g in groups if g.oldest_version is not None]
    if staleness:
        metrics["rollout/staleness_mean"] = float(np.mean(staleness))
        metrics["rollout/staleness_max"] = float(max(staleness))
    return metrics | _components(groups) | _counts(groups) | _sources(groups) | _drop_counts(groups)


def step_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the ``train/...`` metrics of a batch's optimizer steps: means, except for ``*_max`` and `LAST`."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _reduce(name, [step[name] for step in steps if name in step]) for name in names}


def _reduce(name: str, values: Sequence[float]) -> float:
    if name in LAST:
        return float(values[-1])
    return float(max(values)) if name.endswith("_max") else float(np.mean(values))


def _components(groups: Sequence[GroupRef]) -> dict[str, float]:
    means: dict[str, Mean] = {}
    for group in groups:
        for name, values in group.components.items():
            known = values[~np.isnan(values)]  # nan where a sample has no such component
            means[name] = means.get(name, Mean()) + Mean(float(known.sum()), len(known))
    return {f"reward/{name}": mean.value for name, mean in sorted(means.items()) if mean.count}


def _counts(groups: Sequence[GroupRef]) -> dict[str, float]:
    """Compute the means of turns and tool calls over rollouts, and the fraction of failed calls."""
    found = {name: np.concatenate([np.zeros(0), *(g.counts.get(name, ()) for g in groups)]) for name in COUNTS}
    metrics = {f"rollout/{name}_mean": float(found[name].mean()) for name in ("turns", "calls") if len(found[name])}
    if found["calls"].sum():
        metrics["rollout/failed_calls"] = float(found["failed_calls"].sum() / found["calls"].sum())
    return metrics


def _sources(groups: Sequence[GroupRef]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name in sorted({group.source for group in groups if group.source}):
        own = [group for group in groups if group.source == name]
        rewards = np.concatenate([group.rewards for group in own])
        metrics[f"rollout/source/{name}"] = len(own) / len(groups)
        if len(rewards):
            metrics[f"reward/source/{name}"] = float(rewards.mean())
    return metrics


def _drop_counts(groups: Sequence[GroupRef]) -> dict[str, float]:
    kinds = [g.dropped_by for g in groups if g.dropped_by]
    return {f"rollout/dropped/{kind}": float(kinds.count(kind)) for kind in sorted(set(kinds))}
