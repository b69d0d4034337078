"""Validate everything before a run starts its first process, for `rl train` and its dry run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plasmid.components import DataFacts, PlanRow, PromptEncoder, PromptStream
from plasmid.config.profiles import check_named
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.types.runs import Mode
from plasmid.utils.json_text import read_json
from plasmid_models.source import download_models, pin_revisions
from plasmid_models.tokenization.tokenizer import prompt_encoder

from ..checkpoint.folder import CheckpointFolder, check_intact
from ..checkpoint.resume import ResumePoint, open_resume_point, read_resume_point
from ..checkpoint.run_folder import (
    RunFolder,
    check_lockable,
    choose_new_folder,
    find_newest_folder,
    find_resumable_folder,
    lock_folder,
)
from ..data.data_thread import DataCalls, DataThread
from ..evaluation.sets import EvaluationSet, open_sets
from ..observe.observers import check_observers
from ..planning.offload import resolve_offload
from ..rollout.producers.replay import check_replay, find_stored_batches
from .model_plan import plan_models
from .validation import check, text_encoder, warn_of_slow_bfloat16

log = logging.getLogger(__name__)
QUICK_S = 0.2
"""Seconds in which opening the data raises most of its errors; nothing is started meanwhile before they have passed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRun:
    """Validated inputs of a run."""

    config: RunConfig
    """The recipe, with `run.batches` reduced if the data ends earlier."""
    folder: RunFolder
    stream: PromptStream
    data: DataCalls
    """Thread that runs all calls to the data stream."""
    facts: DataFacts
    sets: tuple[EvaluationSet, ...]
    state: ResumePoint | None
    """Checkpoint to resume from; None for a new run."""
    models: Sequence[PlanRow] = ()
    """Layout of the models on trainer and engine."""


def prepare_run(
    config: RunConfig,
    mode: Mode,
    stack: ExitStack,
    *,
    observers: Sequence[object] = (),
    dry_run: bool = False,
    meanwhile: Callable[[], None] | None = None,
) -> PreparedRun:
    """Validate everything possible before starting processes, and lock the run folder.

    A dry run writes nothing, and opens the tokenizer only if prompts are chats or have a limit on tokens. ``meanwhile``
    is called while the data of a new run opens, if that takes longer than `QUICK_S`. Raises `PlasmidError`.
    """
    check_observers(observers)
    training = not mode.rollouts_only
    config, lacking = download_models(_pin_saved_revisions(config, mode), weights=not dry_run)
    config, reason = resolve_offload(config)
    check(config, training=training, unused=mode.unused_tables(), weights=not lacking)
    warn_of_slow_bfloat16(config)
    models = plan_models(config) if training else []
    if reason:
        models.append(("offloaded while idle", _resolve_offload(config), reason))
        if not dry_run:
            log.info("offloaded while idle: %s (%s)", _resolve_offload(config), reason)
    models += [
        ("weights to download", name, f"rl train downloads them; to do it now: hf download {name}") for name in lacking
    ]
    if mode.replay is not None:
        check_replay(config, mode.replay)
    folder, resume = _find_folder(config, mode)
    if training and not resume and config.checkpoint.start_from != "none":
        check_intact(Path(config.checkpoint.start_from))
    encode = text_encoder(config) if dry_run else prompt_encoder(config.model)
    data = stack.enter_context(DataThread())
    stream, facts = open_data(config, encode, stack, data, meanwhile=None if resume else meanwhile)
    with_sets = mode.replay is None and config.rollout is not None
    sets = data.submit(lambda: open_sets(config, encode)).result() if with_sets else ()
    config = limit_batches(config, facts, mode.replay)
    resume = _lock(folder, mode, stack, resume=resume, dry_run=dry_run)
    state = None
    if resume:
        state = (read_resume_point if dry_run else open_resume_point)(folder, config)
        if mode.replay is None and state.state.batch < config.run.batches:
            data.submit(lambda: _restore(stream, state)).result()
    return PreparedRun(
        config=config,
        folder=folder,
        stream=stream,
        data=data,
        facts=facts,
        sets=sets,
        state=state,
        models=models,
    )


def _resolve_offload(config: RunConfig) -> str:
    parts = {"trainer": config.placement.offload_trainer, "engine": config.placement.offload_engine}
    return " and ".join(name for name, is_moved in parts.items() if is_moved) or "nothing"


def _pin_saved_revisions(config: RunConfig, mode: Mode) -> RunConfig:
    """Pin models of the Hub to the revisions with which the resumed run started."""
    folder = find_resumable_folder(config) if mode.resume else None
    if folder is None:
        return config
    try:
        saved = read_json(folder.config)
    except (OSError, ValueError):  # reading the checkpoint reports the problem later
        return config
    return pin_revisions(config, saved) if isinstance(saved, dict) else config


def _find_folder(config: RunConfig, mode: Mode) -> tuple[RunFolder, bool]:
    """Return the run folder, and whether the run resumes from a checkpoint in it."""
    if mode.resume != "auto":
        return (find_newest_folder(config), True) if mode.resume else (choose_new_folder(config), False)
    found = find_resumable_folder(config)
    if found is not None:
        return found, True
    folder = choose_new_folder(config) if config.run.dir == "auto" else RunFolder(Path(config.run.dir))
    log.warning("%s: no checkpoint to resume from; starting a new run", folder.path)
    return folder, False


def _lock(folder: RunFolder, mode: Mode, stack: ExitStack, *, resume: bool, dry_run: bool) -> bool:
    """Lock the run folder, or check whether a dry run could. Returns whether the run resumes from a checkpoint."""
    folder.check_links()
    may_start = mode.resume == "auto" and not resume
    if dry_run:
        check_lockable(folder.path)
        if may_start:
            folder.check_unsaved()
        return resume
    stack.enter_context(lock_folder(folder.path))
    if may_start:
        # before the folder was locked, another process may have saved a checkpoint
        resume = bool(CheckpointFolder.list_complete(folder.checkpoints))
        if not resume:
            folder.clear()
    return resume


def open_data(
    config: RunConfig,
    encode: PromptEncoder,
    stack: ExitStack,
    data: DataThread,
    *,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[PromptStream, DataFacts]:
    """Open the training prompts; ``stack`` closes them. Raises `DataError`, also for unknown profiles.

    ``meanwhile`` is called if they do not open within `QUICK_S`, as when a tokenizer has to be imported.
    """
    opening = data.submit(lambda: config.data.stream(encode, seed=config.run.seed))
    if meanwhile is not None and not wait([opening], QUICK_S).done:
        meanwhile()
    stream = opening.result()
    stack.callback(data.close, stream)
    facts = data.submit(stream.facts).result()
    check_named(facts, config.profiles)
    return stream, facts


def _restore(stream: PromptStream, restored: ResumePoint) -> None:
    """Raise `CheckpointError` if the data differs from that of the checkpoint. The producer restores it again later."""
    state = restored.state.producer.get("stream")
    if state is None:
        raise CheckpointError(
            f"{restored.path}: checkpoint of a run with --replay, which cannot be resumed; remove --resume"
        )
    stream.restore(state)


def count_data_batches(config: RunConfig, facts: DataFacts, replay: Path | None = None) -> int | None:
    """Return the maximum number of batches that the data, or a run's stored samples, provide; None if unlimited."""
    if replay is not None:
        return len(find_stored_batches(replay))
    return None if facts.num_draws is None else math.ceil(facts.num_draws / config.run.prompts_per_batch)


def limit_batches(config: RunConfig, facts: DataFacts, replay: Path | None = None) -> RunConfig:
    """Reduce `run.batches` to the number of batches that the data provides.

    Learning-rate schedules, the last evaluation and everything else that depends on the end of the run use it. If
    filters drop so many groups that the data ends even earlier, the loop logs a warning.
    """
    limit = count_data_batches(config, facts, replay)
    if limit is None or limit >= config.run.batches:
        return config
    planned = max(1, limit)  # if there are no prompts at all, the loop raises the error
    what = f"--replay {replay} has" if replay is not None else "the data has prompts for"
    log.warning(
        "%s %d batches, fewer than run.batches = %d; training %d batches", what, limit, config.run.batches, planned
    )
    return config.model_copy(update={"run": config.run.model_copy(update={"batches": planned})})
