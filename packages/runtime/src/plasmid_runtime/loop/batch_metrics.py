"""Metrics of one batch: rollouts, times, and the mismatch between trainer and engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from plasmid.config.loop import LoopConfig
from plasmid.errors import EngineError
from plasmid.types.batch import GroupRef

from ..data.evaluation import count_passed, pass_at_k
from ..observe.metrics import rollout_metrics
from ..rollout.producers.producer import ProducedGroups

log = logging.getLogger(__name__)
PHASES = ("sample", "score", "train", "sync")
MOVES = ("pause", "sleep", "onload", "offload", "wake", "resume")
"""Moves between trainer and engine whose durations are reported; they happen within and between phases."""
STALENESS = "rollout/staleness"
MISMATCH = "train/mismatch_kl"
SKIPPED = ("train/skipped", "train/critic_skipped")


def batch_rollout_metrics(
    taken: ProducedGroups, *, version: int, run: LoopConfig, scored: bool, published: bool
) -> dict[str, float]:
    """Compute rollout metrics over all new groups, including dropped ones, and staleness over the trained ones.

    Omits rewards unless samples are ``scored``, and versions unless weights are ``published``.
    """
    left_out = (STALENESS,) if scored else (STALENESS, "reward/")
    groups = [*taken.new, *taken.dropped]
    everything = rollout_metrics(groups, version=version)
    everything |= pass_metrics(groups, num_samples=run.samples_per_prompt, threshold=run.pass_threshold)
    trained = rollout_metrics(taken.new, version=version)
    metrics = {name: value for name, value in everything.items() if not name.startswith(left_out)}
    if published:
        metrics |= {name: value for name, value in trained.items() if name.startswith(STALENESS)}
    return metrics | dict(taken.metrics)


def pass_metrics(groups: Sequence[GroupRef], *, num_samples: int, threshold: float) -> dict[str, float]:
    """Compute ``reward/pass@1`` and ``reward/pass@<num_samples>`` of the rollouts, over prompts."""
    tried = [count_passed(group, threshold) for group in groups]
    return {
        f"reward/pass@{k}": float(np.mean([pass_at_k(n, passed, k) for n, passed in tried if n >= k]))
        for k in (1, num_samples)
        if any(n >= k for n, _ in tried)
    }


def check_failures(taken: ProducedGroups, *, limit: float) -> None:
    """Raise `EngineError` if a larger fraction of the rollouts failed than `run.max_failed`."""
    groups = [*taken.new, *taken.dropped]
    failed = [error for group in groups for error in group.errors]
    total = len(failed) + sum(group.num_samples for group in groups)
    if failed and len(failed) / total > limit:
        raise EngineError(
            f"rollouts: {len(failed)} of {total} failed, more than run.max_failed = {limit:g}; the last error: "
            f"{failed[-1]}"
        )


def timing_metrics(seconds: Mapping[str, float], total_s: float, groups: Sequence[GroupRef]) -> dict[str, float]:
    """Return the duration of each phase and of the batch, in seconds, and the trained tokens per second."""
    tokens = float(sum(group.lengths.sum() for group in groups))
    named = {f"perf/{name}_s": seconds[name] for name in (*PHASES, *MOVES) if name in seconds}
    rate = {"perf/tokens_per_s": tokens / total_s} if total_s > 0 else {}
    return {**named, "perf/batch_s": total_s, **rate}


def warn_of_mismatch(metrics: Mapping[str, float], *, batch: int, limit: float) -> None:
    """Warn if trainer and engine assign different probabilities to the sampled tokens.

    Some difference is expected with stale rollouts or several optimizer steps, which are off-policy.
    """
    if limit and metrics.get(MISMATCH, 0.0) > limit:
        log.warning(
            "batch %d: trainer and engine disagree: %s is %.3g, above run.warn_mismatch = %g; log-probabilities "
            "differ by %.3g on average and %.3g at most (staleness %g)",
            batch,
            MISMATCH,
            metrics[MISMATCH],
            limit,
            metrics.get("train/logprob_diff_mean", float("nan")),
            metrics.get("train/logprob_diff_max", float("nan")),
            metrics.get(f"{STALENESS}_max", 0.0),
        )


def warn_of_skipped_steps(metrics: Mapping[str, float], *, batch: int) -> None:
    """Warn if optimizer steps of the policy or of the critic were skipped."""
    for name in SKIPPED:
        if metrics.get(name, 0.0) > 0:
            log.warning(
                "batch %d: %s is %.3g: gradients were not finite, and these optimizer steps changed no weights; lower "
                "trainer.lr, or check the loss of a custom algorithm",
                batch,
                name,
                metrics[name],
            )
