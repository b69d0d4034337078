"""Context for opening light components."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .engine import EngineClient


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunContext:
    """Resources of a started run that light components can use, passed to `Component.open`."""

    seed: int
    run_dir: Path
    engine: EngineClient | None = None
    """Client of the engine; None for runs without an engine."""
    model_type: str = ""
    """``model_type`` in the config of the policy's folder; empty if it has none."""
