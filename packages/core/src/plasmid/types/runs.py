"""What kind of run is asked for, and what a run has reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What kind of run this is."""

    resume: bool = False
    replay: Path | None = None
    """Train on the stored samples of this run; no engine is started."""
    rollouts_only: bool = False
    """Sample and score only; no trainer is started."""

    def unused_tables(self) -> tuple[str, ...]:
        """Tables of a recipe whose components such a run never calls."""
        if self.replay is not None:
            return ("rollout", "rewards", "workflow", "filters", "profiles", "buffer", "eval")
        return ("trainer",) if self.rollouts_only else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run reached and wrote."""

    run_dir: Path
    steps: int
    """Batches trained, those before a resume included."""
    interrupted: bool
    """True if it was stopped (Ctrl-C) before its last batch."""
    final: Path | None
    """Hugging Face folder of the final policy."""
    checkpoint: Path | None
    """Newest checkpoint."""
    evaluations: Mapping[str, tuple[tuple[int, float], ...]]
    """Set name -> (batches trained, mean reward)."""
    seconds: float
    was_finished: bool = False
    """True if all batches had been trained before; at most the final policy has then been written."""
