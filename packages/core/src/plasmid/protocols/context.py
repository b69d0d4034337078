"""What light components are opened with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .engine import EngineClient


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext:
    """What light components may use once a run has begun (`Component.open`)."""

    seed: int
    run_dir: Path
    engine: EngineClient | None = None
    """None where no engine is started."""
