"""What Python users call; the `rl` command is a thin face of the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .config import RunConfig

if TYPE_CHECKING:
    from .run.lifecycle.session import RunResult


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    replay: Path | None = None,
    rollouts_only: bool = False,
    observers: Sequence[object] = (),
) -> RunResult:
    """Run the whole job and return what it reached and wrote.

    Runs on the Ray that this process or the recipe names, or starts one of its own.
    """
    from .run.lifecycle.preparation import Mode  # imports what only a run needs
    from .run.lifecycle.session import run

    mode = Mode(resume=resume, replay=replay, rollouts_only=rollouts_only)
    return run(config, mode=mode, observers=observers)
