"""Export the final policy of a run, or the policy of a checkpoint, as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from plasmid.config.run import RunConfig
from plasmid.config.stored_recipe import resolve_stored
from plasmid.errors import CheckpointError, one_line
from plasmid.protocols import Trainer
from plasmid.utils.json_text import read_json
from plasmid.utils.safe_files import sync_tree, write_text
from plasmid_models.manifest import STATE
from plasmid_models.source import download_models

from ..checkpoint.folder import check_intact, find_newest_intact, read_state
from ..checkpoint.run_folder import RunFolder
from ..observe.driver_log import Transcript
from .hang_report import report_hangs
from .shutdown import Interrupts, LoggingExitStack, raise_cluster_failures
from .startup import MakeCluster, make_ray_factory, run_interruptible, start_run
from .validation import check

log = logging.getLogger(__name__)
ORIGIN = "plasmid.json"
"""File with the recipe and batch of exported weights. Written last, so it marks a complete export."""

UNUSED = ("workflow", "filters", "profiles", "trackers")
"""Tables of a recipe that have a default and that no export uses."""
STAND_IN = "number"
"""Kind of reward in place of those of the recipe."""


async def export_policy(config: RunConfig, trainer: Trainer, target: Path, batch: int) -> None:
    """Export the trainer's policy, trained on ``batch`` batches. Raises `CheckpointError` and `DeadlineError`."""
    await trainer.export(target)
    try:
        await asyncio.to_thread(sync_tree, target)
        write_text(target / ORIGIN, json.dumps({"recipe": config.recipe, "batch": batch}), durable=True)
    except OSError as error:
        raise CheckpointError(f"{target}: the model cannot be written: {one_line(error)}") from error


def read_exported_batch(target: Path) -> int | None:
    """Return the number of batches that the policy in this folder was trained on; None if it is not complete."""
    try:
        return int(read_json(target / ORIGIN)["batch"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    overrides: Sequence[str] = (),
    config: RunConfig | None = None,
    trust_recipe: bool = False,
    warn: Callable[[str], None] = log.warning,
    make_cluster: MakeCluster | None = None,
    transcript: Transcript | None = None,
) -> int:
    """Export the policy of a checkpoint, or of the newest one in a run folder, and return its batch.

    Starts the trainer configured by ``config`` or by the checkpoint's recipe. Unless ``trust_recipe``,
    only its inert settings are used, which cannot execute code; ``warn`` receives a notice about the others. The
    ``transcript`` is appended to the log of the run. Raises `PlasmidError`.
    """
    checkpoint = _checkpoint(source)
    state = read_state(checkpoint)
    if config is None:
        _check_targets(target)
        recipe = drop_unused_components(state.config)
        config, notice = resolve_stored(recipe, checkpoint, overrides=overrides, trust=trust_recipe)
        if notice:
            warn(notice)
    config, _ = download_models(config)
    check(config, unused=[name for name in RunConfig.model_fields if name not in ("model", "trainer", "algorithm")])
    with ExitStack() as stack:
        run_dir = checkpoint.parent.parent
        if not (run_dir / "config.json").exists():  # the checkpoint was copied out of its run
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = RunFolder(run_dir)
        folder.check_links()
        folder.logs.mkdir(exist_ok=True)
        if transcript is not None:
            transcript.run_started(run_dir)
        run_interruptible(
            _export(config, checkpoint, target, state.batch, folder, make_cluster or make_ray_factory(config))
        )
    return state.batch


def drop_unused_components(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe without the components of rollouts, which an export needs neither installed nor trusted.

    Rewards, which many algorithms require, become `STAND_IN`s of the same names.
    """
    kept = {key: value for key, value in recipe.items() if key not in UNUSED}
    for key, item in (("rewards", _replace_reward), ("eval", _drop_rewards)):
        values = kept.get(key)
        if isinstance(values, list) and all(isinstance(value, Mapping) for value in values):
            kept[key] = [item(index, value) for index, value in enumerate(values)]
    return kept


def _replace_reward(index: int, reward: Mapping[str, Any]) -> dict[str, Any]:
    name = reward.get("name", "auto")
    return {"kind": STAND_IN, "name": f"{reward.get('kind')}-{index}" if name == "auto" else name}


def _drop_rewards(index: int, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in evaluation.items() if key != "rewards"}


def _check_targets(target: Path) -> None:
    """Raise `CheckpointError` if a target of policy, adapter or critic exists and is not an empty folder."""
    for path in (target, *(target.parent / f"{target.name}-{part}" for part in ("adapter", "critic"))):
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise CheckpointError(f"{path}: already exists; remove it or choose another folder")


async def _export(
    config: RunConfig, checkpoint: Path, target: Path, batch: int, folder: RunFolder, make_cluster: MakeCluster
) -> None:
    with Interrupts():
        async with LoggingExitStack() as stack, report_hangs(folder, config.run) as hangs:
            handles = await start_run(
                config, folder, hangs.wrap_cluster(make_cluster), with_trainer=True, with_engine=False, is_new=False
            )
            stack.add_close("the trainer", handles.close)
            assert handles.trainer is not None
            async with raise_cluster_failures(handles.cluster):
                await handles.trainer.load(checkpoint / "trainer")
                await export_policy(config, handles.trainer, target, batch)


def _checkpoint(source: Path) -> Path:
    """Return ``source`` if it is a checkpoint, or the newest intact checkpoint if it is a run folder."""
    if (source / STATE).is_file():
        read_state(source)
        check_intact(source)
        return source
    if not (source / "checkpoints").is_dir():
        raise CheckpointError(f"{source}: neither a checkpoint (it has no {STATE}) nor the folder of a run")
    found = find_newest_intact(source / "checkpoints")
    if found is None:
        raise CheckpointError(f"{source}: no complete checkpoint")
    return found
