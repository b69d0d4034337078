"""Learning curves of a recipe, and whether they are worse than a reference.

Two numbers of each seed are compared: the area under the curve of held-out reward over batches, divided by the number
of batches, and the reward after the last batch. Each is worse if its mean over the new seeds is lower than its mean
over the reference's seeds by more than

    limit = max(0.02, z sqrt(v/n + w/m), t s sqrt(1/n + 1/m))

where n and m are the numbers of seeds of the reference and of the new runs.

The second term is the sampling error of the evaluations: z = 1.96, and v and w are the means over the seeds of the
variance of the number. The variance of an evaluation of N samples with mean reward p is p (1 - p) / N, an upper bound
for rewards from 0 to 1; p is replaced by (p N + 1) / (N + 2), because the bound is 0 at p = 1. In the variance of the
area, each evaluation has the square of its weight in the trapezoidal rule.

The third term is the spread between seeds, which includes the sampling error: s is the standard deviation over the
seeds of the reference, and t the 97.5 % quantile of Student's distribution with n - 1 degrees of freedom. The spread
of the new runs is not used, because a change that makes learning unstable would raise its own limit.

If nothing changed, each number is called worse with a probability of at most about 2.5 %, so at most about one of 20
comparisons fails by chance. With two seeds in the reference t is 12.7, with three 4.3, with five 2.8: use at least
three.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from plasmid.errors import ConfigError

MARGIN = 0.02
"""Difference of reward that never counts as worse."""
Z = 1.96
"""97.5 % quantile of the normal distribution."""
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's distribution with 1, 2, ... degrees of freedom; the last is used for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The evaluations of one seed."""

    seed: int
    batches: Sequence[int]
    """Number of batches trained before each evaluation."""
    rewards: Sequence[float]
    batch_s: Sequence[float]
    """Time of each batch, in seconds."""

    def area(self) -> float:
        """Return the mean reward over all batches, by the trapezoidal rule."""
        return sum(weight * reward for weight, reward in zip(self._weights(), self.rewards, strict=True))

    def final(self) -> float:
        """Return the reward after the last batch."""
        return self.rewards[-1]

    def area_variance(self, num_samples: int) -> float:
        """Return the variance of the area due to the evaluations' samples."""
        variances = (reward_variance(reward, num_samples) for reward in self.rewards)
        return sum(weight**2 * variance for weight, variance in zip(self._weights(), variances, strict=True))

    def final_variance(self, num_samples: int) -> float:
        """Return the variance of the final reward due to the evaluation's samples."""
        return reward_variance(self.rewards[-1], num_samples)

    def _weights(self) -> list[float]:
        weights = [0.0] * len(self.batches)
        for index, (before, after) in enumerate(pairwise(self.batches)):
            share = (after - before) / (self.batches[-1] - self.batches[0])
            weights[index] += share / 2
            weights[index + 1] += share / 2
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Curves of one recipe, as they are written to a file."""

    recipe: str
    command: str
    """Command of one seed, with ``SEED`` in its place."""
    commit: str
    device: str
    versions: Mapping[str, str]
    evaluation: str
    """Name of the evaluation set."""
    num_samples: int
    """Number of samples of one evaluation."""
    settings: Mapping[str, Any]
    """Settings of the runs by key, without those that may differ."""
    curves: Sequence[Curve]

    def to_json(self) -> str:
        """Format as JSON, with each list of numbers on one line."""
        text = json.dumps(asdict(self), indent=1)
        return re.sub(r"\[\n([^][{}\"]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One compared number."""

    name: str
    reference: float
    new: float
    limit: float
    """Largest decrease that is explained by noise."""

    @property
    def is_worse(self) -> bool:
        """True if the decrease exceeds the limit."""
        return self.reference - self.new > self.limit

    @property
    def is_better(self) -> bool:
        """True if the increase exceeds the limit."""
        return self.new - self.reference > self.limit


def reward_variance(reward: float, num_samples: int) -> float:
    """Return the variance of the mean of ``num_samples`` rewards between 0 and 1 whose mean is ``reward``."""
    mean = (reward * num_samples + 1) / (num_samples + 2)
    return mean * (1 - mean) / num_samples


def read_report(path: Path) -> Report:
    """Read a file of `Report.to_json`. Raises `ConfigError` if it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Report(**{**found, "curves": [Curve(**curve) for curve in found["curves"]]})
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a file of benchmarks/learning.py: {error}; give one of its --out") from error


def compare(reference: Report, new: Report, *, changed: Sequence[str] = ()) -> list[Difference]:
    """Compare the area and the final reward of the curves. Raises `ConfigError` if they cannot be compared."""
    check_settings(reference.settings, new.settings, changed, names=("the reference has", "these runs have"))
    if (reference.evaluation, reference.num_samples) != (new.evaluation, new.num_samples):
        sets = [f"{one.num_samples} samples of {one.evaluation!r}" for one in (reference, new)]
        raise ConfigError(f"eval: the reference was evaluated on {sets[0]}, these runs on {sets[1]}; use the same set")
    steps = sorted({tuple(curve.batches) for curve in (*reference.curves, *new.curves)})
    if len(steps) > 1:
        shown = " and ".join(str(list(own)) for own in steps)
        raise ConfigError(f"eval: the runs were evaluated after different batches: {shown}; use the same eval.every")
    if len(reference.curves) < 2:
        raise ConfigError("seeds: the reference has one seed, which gives no spread; record at least three")
    return [
        find_difference("area under the curve", reference, new, Curve.area, Curve.area_variance),
        find_difference("final reward", reference, new, Curve.final, Curve.final_variance),
    ]


def find_difference(
    name: str,
    reference: Report,
    new: Report,
    value: Callable[[Curve], float],
    variance: Callable[[Curve, int], float],
) -> Difference:
    """Compare the means of a number over the seeds, with the limit that the module describes."""
    values = [[value(curve) for curve in report.curves] for report in (reference, new)]
    sampling = [fmean(variance(curve, r.num_samples) for curve in r.curves) for r in (reference, new)]
    n, m = map(len, values)
    limits = (
        MARGIN,
        Z * math.sqrt(sampling[0] / n + sampling[1] / m),
        T[min(n - 1, len(T)) - 1] * stdev(values[0]) * math.sqrt(1 / n + 1 / m),
    )
    return Difference(name=name, reference=fmean(values[0]), new=fmean(values[1]), limit=max(limits))


def check_settings(
    left: Mapping[str, Any], right: Mapping[str, Any], changed: Sequence[str], *, names: tuple[str, str]
) -> None:
    """Raise `ConfigError` if a setting that both have differs and is not in ``changed``.

    Settings that only one of them has were added or removed by a commit, and do not count.
    """
    differing = [
        f"{key}: {names[0]} {left[key]!r}, {names[1]} {right[key]!r}"
        for key in left.keys() & right.keys()
        if left[key] != right[key] and not any(key == own or key.startswith(f"{own}.") for own in changed)
    ]
    if differing:
        raise ConfigError("\n".join(f"{line}; use the same, or allow it with --changed" for line in sorted(differing)))
