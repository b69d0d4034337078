"""Show the progress of an active run, as in the terminal that started it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from plasmid.config.loop import LoopConfig
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid_runtime.control.client import Watcher
from plasmid_runtime.observe.progress import ProgressObserver, RunState
from rich.console import Console

from ..display.progress import make_progress

SHOWN = {
    "phase_started": {"batch": int, "phase": str, "version": int},
    "batch_finished": {"batch": int, "metrics": dict},
    "evaluation_finished": {"batch": int, "name": str, "metrics": dict},
    "checkpoint_saved": {"batch": int, "path": str, "seconds": float},
}
"""Messages of a run, with the types of their values; other versions may send different ones."""


def show(run: Path, console: Console) -> None:
    """Show the run's progress until it ends, or until Ctrl-C. Raises `ConfigError` if it is not running here."""
    watcher = Watcher(run)
    before = signal.signal(signal.SIGINT, lambda *_: watcher.stop())  # libraries may swallow KeyboardInterrupt
    try:
        _show(run, watcher, console)
    finally:
        signal.signal(signal.SIGINT, before)
    ending = f"detached; the run continues: rl attach {run}" if watcher.is_stopped else "the run has ended"
    console.print(ending, soft_wrap=True)


def _show(run: Path, watcher: Watcher, console: Console) -> None:
    messages = watcher.messages()
    hello = next(messages, None)
    if hello is None:
        return
    state = RunState(_config(run, hello))
    with make_progress(state.config, console, state) as progress:
        for message in messages:
            if watcher.is_stopped:
                return
            is_earlier = state.phase == "start"  # a batch that ended before this client was attached
            _notify(progress, message)
            if is_earlier and state.recent:
                state.durations[-1] = state.recent[-1][1].get("perf/batch_s", state.durations[-1])


def _config(run: Path, hello: Mapping[str, Any]) -> RunConfig:
    """Build the part of the run's configuration that the display needs."""
    recipe, batches, prompts = (hello.get(name) for name in ("recipe", "batches", "prompts_per_batch"))
    if not isinstance(recipe, str) or not isinstance(batches, int) or not isinstance(prompts, int):
        raise ConfigError(f"{run}: the answer is not from a run of this version")
    loop = LoopConfig.model_construct(batches=batches, prompts_per_batch=prompts)
    values: dict[str, Any] = {"recipe": recipe, "run": loop}
    return RunConfig.model_construct(**values)


def _notify(progress: ProgressObserver, message: Mapping[str, Any]) -> None:
    """Call the observer hook that a message names. Ignores messages of unknown form."""
    event = str(message.get("event"))
    if event == "group_scored" and hasattr(progress, "group_scored"):
        dropped: Any = SimpleNamespace(dropped_by="x" if message.get("dropped") else "")  # all that a display reads
        progress.group_scored(dropped)
        return
    types = SHOWN.get(event, {})
    values: dict[str, Any] = {name: message.get(name) for name in types}
    if not types or not all(isinstance(value, types[name]) for name, value in values.items()):
        return
    if "metrics" in values:
        metrics = values["metrics"].items()
        values["metrics"] = {str(name): float(value) for name, value in metrics if isinstance(value, int | float)}
    getattr(progress, event)(**values)
