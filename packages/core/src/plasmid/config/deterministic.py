"""Recipes that ``run.deterministic`` does not cover."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..components import kind_of

if TYPE_CHECKING:
    from .run import RunConfig

KEY = "run.deterministic"


def find_deterministic_errors(config: RunConfig) -> Iterator[str]:
    """Yield errors for settings with which trainer and engine cannot give bitwise equal results."""
    if not config.run.deterministic:
        return
    trainer, engine = config.trainer, config.rollout
    if not trainer.is_batch_invariant():
        yield f"{KEY}: trainer {kind_of(trainer)!r} has no batch-invariant kernels; use another, or remove the setting"
    if engine is not None and not engine.is_batch_invariant():
        yield (
            f"{KEY}: engine {kind_of(engine)!r} does not compute with the trainer's kernels; use one that "
            "does, or remove the setting"
        )
    if config.run.max_staleness:
        yield (
            f"run.max_staleness: must be 0 with {KEY}, got {config.run.max_staleness}: timing would determine which "
            "policy version samples a token"
        )
    threads = config.placement.threads
    if threads not in ("auto", 1):
        yield f"placement.threads: must be 1 with {KEY}, got {threads}; remove it"
    for place, sampling in config.samplings().items():
        for name, value in sampling.restrictions.items():
            yield (
                f"{place}.{name}: must not restrict sampling with {KEY}, got {value}: the trainer normalizes over the "
                "remaining tokens in a different order than the engine; remove it"
            )
