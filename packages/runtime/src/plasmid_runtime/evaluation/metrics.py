"""What the samples of an evaluation set come to, and the mean over several sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from plasmid.config.evaluation import EvalConfig
from plasmid.types.batch import GroupRef

from ..data.evaluation import pass_at_k

MEAN = "mean"
"""Name in metrics of the mean over all sets."""


def summarize(settings: EvalConfig, groups: Sequence[GroupRef], values: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of one set. Failed rollouts count as reward 0; a prompt weighs the same however many samples it has.

    ``stderr/<metric>`` is the standard error of a mean over prompts: two of them to either side hold the true mean with
    about 95 %. ``values`` are those of the column that results are split by, one for each group.
    """
    prefix = f"eval/{settings.name}"
    lengths = np.concatenate([np.zeros(0), *(group.lengths - group.prompt_lengths for group in groups)])
    truncated = np.concatenate([np.zeros(0, np.bool_), *(group.truncated for group in groups)])
    versions = [group.oldest_version for group in groups if group.oldest_version is not None]
    metrics = _scores(settings, groups)
    metrics |= {
        "length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "truncated": float(truncated.mean()) if len(truncated) else 0.0,
        "failed": float(sum(len(group.errors) for group in groups)),
    }
    if versions:
        metrics |= {"version_min": float(min(versions)), "version_max": float(max(versions))}
    metrics |= _components(groups)
    for value in sorted(set(values)):
        members = [group for group, own in zip(groups, values, strict=True) if own == value]
        split = {"prompts": float(len(members)), **_scores(settings, members)}
        metrics |= {f"{settings.by}={value}/{name}": number for name, number in split.items()}
    return {f"{prefix}/{name}": number for name, number in metrics.items()}


def _scores(settings: EvalConfig, groups: Sequence[GroupRef]) -> dict[str, float]:
    """Mean reward and pass@k over prompts, each with its standard error."""
    rewards = [np.concatenate([group.rewards, np.zeros(len(group.errors))]) for group in groups]
    passed = [(len(own), int((own >= settings.pass_threshold).sum())) for own in rewards]
    per_prompt = {"reward": np.array([own.mean() for own in rewards])}
    for k in settings.pass_at:
        per_prompt[f"pass@{k}"] = np.array([pass_at_k(n, c, k) for n, c in passed])
    metrics = {name: float(numbers.mean()) for name, numbers in per_prompt.items()}
    return metrics | {f"stderr/{name}": standard_error(numbers) for name, numbers in per_prompt.items()}


def standard_error(numbers: NDArray[np.float64]) -> float:
    """Standard error of the mean; 0 of a single number, of which nothing is known."""
    return float(numbers.std(ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else 0.0


def _components(groups: Sequence[GroupRef]) -> dict[str, float]:
    metrics = {}
    for name in sorted({name for group in groups for name in group.components}):
        values = np.concatenate([group.components[name] for group in groups if name in group.components])
        if not np.isnan(values).all():
            metrics[name] = float(np.nanmean(values))
    return metrics


def mean_over_sets(sets: Sequence[EvalConfig], metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Weighted mean over sets of the reward and of every pass@k that all of them have, with its standard error."""
    names = ["reward", *(f"pass@{k}" for k in sets[0].pass_at if all(k in set_.pass_at for set_ in sets))]
    weights = np.array([set_.weight for set_ in sets]) / sum(set_.weight for set_ in sets)
    found: dict[str, float] = {}
    for name in names:
        of_sets = np.array([metrics[set_.name][f"eval/{set_.name}/{name}"] for set_ in sets])
        errors = np.array([metrics[set_.name].get(f"eval/{set_.name}/stderr/{name}", 0.0) for set_ in sets])
        found[f"eval/{MEAN}/{name}"] = float(weights @ of_sets)
        found[f"eval/{MEAN}/stderr/{name}"] = float(np.sqrt(weights**2 @ errors**2))
    return found
