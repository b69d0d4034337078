"""Hugging Face folders out of the policies of runs: the last one, or that of any checkpoint."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.config.stored_recipe import resolve_stored
from plasmid.errors import CheckpointError
from plasmid.protocols import Trainer
from plasmid.utils.json_text import read_json

from ..checkpoint.folder import STATE, CheckpointFolder, read_state
from ..checkpoint.run_folder import RunFolder
from .shutdown import Interrupts, LoggingExitStack
from .startup import MakeCluster, interruptible, on_ray, start_run
from .validation import check

log = logging.getLogger(__name__)
ORIGIN = "plasmid.json"
"""Written into an exported folder, last of all: which run and batch its weights come from."""


async def export_policy(config: RunConfig, trainer: Trainer, target: Path, batch: int) -> None:
    """Write the policy of a trainer that has trained this many batches. Raises `CheckpointError`, `DeadlineError`."""
    await trainer.export(target)
    (target / ORIGIN).write_text(json.dumps({"recipe": config.recipe, "batch": batch}))


def is_exported(target: Path, batch: int) -> bool:
    """True if the folder holds the policy after this batch, complete."""
    try:
        return bool(read_json(target / ORIGIN)["batch"] == batch)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    overrides: Sequence[str] = (),
    config: RunConfig | None = None,
    trust_recipe: bool = False,
    warn: Callable[[str], None] = log.warning,
    make_cluster: MakeCluster | None = None,
) -> int:
    """Write the policy of a checkpoint, or of the newest one of a run's folder, and return its batch.

    Starts the trainer that has written it, as the checkpoint's own recipe says, or ``config``. Of that recipe only
    inert settings are taken (`plasmid.config.stored_recipe`) unless ``trust_recipe``; ``warn`` is told of others.
    Raises `PlasmidError`.
    """
    checkpoint = _checkpoint(source)
    state = read_state(checkpoint)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())) and config is None:
        raise CheckpointError(f"{target}: exists already; remove it or choose another folder")
    if config is None:
        config, notice = resolve_stored(state.config, checkpoint, overrides=overrides, trust=trust_recipe)
        if notice:
            warn(notice)
    check(config, unused=[name for name in RunConfig.model_fields if name not in ("model", "trainer", "algorithm")])
    with ExitStack() as stack:
        run_dir = checkpoint.parent.parent
        if not (run_dir / "config.json").exists():  # it was copied out of its run
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = RunFolder(run_dir)
        folder.check_links()
        folder.logs.mkdir(exist_ok=True)
        interruptible(_export(config, checkpoint, target, state.batch, folder, make_cluster or on_ray(config)))
    return state.batch


async def _export(
    config: RunConfig, checkpoint: Path, target: Path, batch: int, folder: RunFolder, make_cluster: MakeCluster
) -> None:
    with Interrupts():
        async with LoggingExitStack() as stack:
            handles = await start_run(config, folder, make_cluster, with_trainer=True, with_engine=False, is_new=False)
            stack.add_close("the trainer", handles.close)
            assert handles.trainer is not None
            await handles.trainer.load(checkpoint / "trainer")
            await export_policy(config, handles.trainer, target, batch)


def _checkpoint(source: Path) -> Path:
    """The checkpoint itself, or the newest of a run's folder."""
    if (source / STATE).is_file():
        return source
    if not (source / "checkpoints").is_dir():
        raise CheckpointError(f"{source}: is neither a checkpoint (it has no {STATE}) nor the folder of a run")
    found = CheckpointFolder.complete(source / "checkpoints")
    if not found:
        raise CheckpointError(f"{source}: has no complete checkpoint")
    return found[-1]
