"""How many batches a run trains: as many as the recipe says, or as the data are enough for."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from ...components import DataFacts
from ...config import RunConfig
from ...rollout.producers.replay import stored_batches

log = logging.getLogger(__name__)


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
