"""What is logged of one batch: of its rollouts, its times, and how far trainer and engine are apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from plasmid.errors import EngineError
from plasmid.types.batch import GroupRef

from ..observe.metrics import rollout_metrics
from ..rollout.producers.producer import Taken

log = logging.getLogger(__name__)
PHASES = ("sample", "score", "train", "sync")
MOVES = ("pause", "sleep", "onload", "offload", "wake", "resume")
"""What the time of a batch is reported by; moves between trainer and engine lie within and between the phases."""
STALENESS = "rollout/staleness"
MISMATCH = "train/mismatch_kl"


def batch_rollout_metrics(taken: Taken, *, version: int, scored: bool, published: bool) -> dict[str, float]:
    """Over all new groups, or filters would hide how good the policy is; staleness over those that are trained on.

    Not ``scored`` samples have rewards of 0 that mean nothing; where nothing is ``published`` versions mean nothing.
    """
    left_out = (STALENESS,) if scored else (STALENESS, "reward/")
    everything = rollout_metrics([*taken.new, *taken.dropped], version=version)
    trained = rollout_metrics(taken.new, version=version)
    metrics = {name: value for name, value in everything.items() if not name.startswith(left_out)}
    if published:
        metrics |= {name: value for name, value in trained.items() if name.startswith(STALENESS)}
    return metrics | dict(taken.metrics)


def check_failures(taken: Taken, *, limit: float) -> None:
    """Raises `EngineError` if a larger share of the rollouts failed than `run.max_failed`."""
    groups = [*taken.new, *taken.dropped]
    failed = [error for group in groups for error in group.errors]
    total = len(failed) + sum(group.num_samples for group in groups)
    if failed and len(failed) / total > limit:
        raise EngineError(
            f"rollouts: {len(failed)} of {total} failed, more than run.max_failed = {limit:g}; the last error was: "
            f"{failed[-1]}"
        )


def timing_metrics(seconds: Mapping[str, float], total_s: float, groups: Sequence[GroupRef]) -> dict[str, float]:
    """Seconds of each phase and of the whole batch, and the tokens trained on in a second of it."""
    tokens = float(sum(group.lengths.sum() for group in groups))
    named = {f"perf/{name}_s": seconds[name] for name in (*PHASES, *MOVES) if name in seconds}
    rate = {"perf/tokens_per_s": tokens / total_s} if total_s > 0 else {}
    return {**named, "perf/batch_s": total_s, **rate}


def warn_of_mismatch(metrics: Mapping[str, float], *, batch: int, limit: float) -> None:
    """Say so if the trainer gives the sampled tokens other probabilities than the engine drew them with.

    With rollouts of older policies, or several optimizer steps, some difference is what off-policy training is.
    """
    if limit and metrics.get(MISMATCH, 0.0) > limit:
        log.warning(
            "batch %d: trainer and engine are far apart: %s is %.3g, above run.warn_mismatch = %g; log-probabilities "
            "differ by %.3g on average and %.3g at most (staleness %g)",
            batch,
            MISMATCH,
            metrics[MISMATCH],
            limit,
            metrics.get("train/logprob_diff_mean", float("nan")),
            metrics.get("train/logprob_diff_max", float("nan")),
            metrics.get(f"{STALENESS}_max", 0.0),
        )
