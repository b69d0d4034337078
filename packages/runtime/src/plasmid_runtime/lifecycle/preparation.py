"""Checks everything before a run starts its first process, for `rl train` and its dry run."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plasmid.components import DataFacts, PlanRow, PromptEncoder, PromptStream
from plasmid.config.profiles import check_named
from plasmid.config.run import RunConfig
from plasmid.errors import CheckpointError
from plasmid.types.runs import Mode
from plasmid_models.tokenization.tokenizer import prompt_encoder

from ..checkpoint.resume import ResumePoint, open_resume_point, read_resume_point
from ..checkpoint.run_folder import RunFolder, check_lockable, lock_folder, new_folder, newest_folder
from ..evaluation.sets import EvaluationSet, open_sets
from ..observe.observers import check_observers
from ..rollout.producers.replay import check_replay, stored_batches
from .model_plan import plan_models
from .validation import check, text_encoder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedRun:
    """What a run begins with."""

    config: RunConfig
    """With the number of batches that the data are enough for."""
    folder: RunFolder
    stream: PromptStream
    sets: tuple[EvaluationSet, ...]
    state: ResumePoint | None
    """None for a new run."""
    models: Sequence[PlanRow] = ()
    """How trainer and engine hold the models."""


def prepare_run(
    config: RunConfig, mode: Mode, stack: ExitStack, *, observers: Sequence[object] = (), dry_run: bool = False
) -> PreparedRun:
    """Validate everything possible before starting processes, and lock the run folder.

    A dry run writes nothing, and opens the tokenizer only where prompts are chats or are limited in tokens. Raises
    `PlasmidError`.
    """
    check_observers(observers)
    training = not mode.rollouts_only
    check(config, training=training, unused=mode.unused_tables())
    models = plan_models(config) if training else ()
    if mode.replay is not None:
        check_replay(config, mode.replay)
    folder = newest_folder(config) if mode.resume else new_folder(config)
    encode = text_encoder(config) if dry_run else prompt_encoder(config.model)
    stream = open_data(config, encode, stack)
    sets = open_sets(config, encode) if mode.replay is None and config.rollout is not None else ()
    config = with_planned_batches(config, stream.facts(), mode.replay)
    if dry_run:
        check_lockable(folder.path)
    else:
        stack.enter_context(lock_folder(folder.path))
    state = None
    if mode.resume:
        state = (read_resume_point if dry_run else open_resume_point)(folder, config)
        if mode.replay is None and state.state.batch < config.run.batches:
            _restore(stream, state)
    return PreparedRun(config=config, folder=folder, stream=stream, sets=sets, state=state, models=models)


def open_data(config: RunConfig, encode: PromptEncoder, stack: ExitStack) -> PromptStream:
    """The training prompts, closed with ``stack``. Raises `DataError`, also for profiles that there are not."""
    stream = config.data.stream(encode, seed=config.run.seed)
    stack.callback(stream.close)
    check_named(stream.facts(), config.profiles)
    return stream


def _restore(stream: PromptStream, restored: ResumePoint) -> None:
    """Raises `CheckpointError` if the data are not those of the checkpoint; the producer restores them once more."""
    state = restored.state.producer.get("stream")
    if state is None:
        raise CheckpointError(f"{restored.path}: is of a run with --replay, which begins anew; leave out --resume")
    stream.restore(state)


def data_batches(config: RunConfig, facts: DataFacts, replay: Path | None = None) -> int | None:
    """Most batches that the data, or the stored samples of a run, are enough for; None where there is no limit."""
    if replay is not None:
        return len(stored_batches(replay))
    return None if facts.num_draws is None else math.ceil(facts.num_draws / config.run.prompts_per_batch)


def with_planned_batches(config: RunConfig, facts: DataFacts, replay: Path | None = None) -> RunConfig:
    """The recipe with the number of batches that is really trained as `run.batches`.

    Learning-rate schedules, the last evaluation and everything else that looks at the end of the run depend on it.
    Where filters may end the data sooner still, the loop says so when they do.
    """
    limit = data_batches(config, facts, replay)
    if limit is None or limit >= config.run.batches:
        return config
    planned = max(1, limit)  # without any prompt the loop says what is wrong
    what = f"--replay {replay} holds" if replay is not None else "the data are enough for"
    log.warning(
        "%s %d batches, so run.batches = %d is not reached; planned for %d", what, limit, config.run.batches, planned
    )
    return config.model_copy(update={"run": config.run.model_copy(update={"batches": planned})})
