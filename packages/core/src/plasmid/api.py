"""What Python users call; the `rl` command is a thin face of the same functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import RunConfig

if TYPE_CHECKING:
    from .run.session import RunResult


def train(config: RunConfig, *, resume: bool = False) -> RunResult:
    """Run the whole job and return what it reached and wrote. Starts Ray if none is running in this process."""
    from .run.session import run  # imports ray: only a run needs it

    return run(config, resume=resume)
