"""What Python users call; the `rl` command is a thin face of the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from .config.run import RunConfig
from .errors import PluginError
from .types.runs import Mode, RunResult


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    replay: Path | None = None,
    rollouts_only: bool = False,
    observers: Sequence[object] = (),
) -> RunResult:
    """Run the whole job and return what it reached and wrote.

    Runs on the Ray that this process or the recipe names, or starts one of its own. Raises `PluginError` if no runtime
    is installed.
    """
    found = entry_points(group="plasmid.runtime", name="train")
    if not found:
        raise PluginError("nothing that runs a recipe is installed; pip install plasmid-runtime")
    mode = Mode(resume=resume, replay=replay, rollouts_only=rollouts_only)
    result: RunResult = next(iter(found)).load()(config, mode=mode, observers=observers)
    return result
