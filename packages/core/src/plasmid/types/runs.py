"""Mode and result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Resume = bool | Literal["auto"]
"""Whether to continue a run from its newest checkpoint; ``auto`` starts a new run if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Mode of a run."""

    resume: Resume = False
    replay: Path | None = None
    """Train on the stored samples of this run; no engine is started."""
    rollouts_only: bool = False
    """Sample and score only; no trainer is started."""

    def unused_tables(self) -> tuple[str, ...]:
        """Return the recipe tables whose components this mode never calls."""
        if self.replay is not None:
            return ("rollout", "teacher", "rewards", "workflow", "filters", "profiles", "buffer", "eval")
        return ("trainer",) if self.rollouts_only else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run."""

    run_dir: Path
    steps: int
    """Number of batches trained, including those before a resume."""
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
    """True if all batches had already been trained; the run then only exported the final policy, if it was missing."""
