"""Evaluation sets: their prompts, and when they are due."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from plasmid.components import PromptEncoder
from plasmid.config.evaluation import EvalConfig
from plasmid.config.profiles import profile_of
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError, DataError
from plasmid.types import Prompt

from ..data.within import relocate_message

MAX_VALUES = 64
"""Maximum number of values of the column ``by``, since each adds several metrics."""
NO_VALUE = "none"
"""Value of prompts without the column."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EvaluationSet:
    """One ``[[eval]]`` table with its prompts."""

    settings: EvalConfig
    prompts: tuple[Prompt, ...]
    values: tuple[str, ...] = ()
    """For each prompt, the value of the column that results are split by; empty if they are not."""

    def is_due(self, batch: int, *, last: bool) -> bool:
        """Return True if an evaluation of the set is due after this many batches."""
        if batch == 0:
            return self.settings.at_start
        if last and self.settings.at_end:
            return True
        return bool(self.settings.every) and batch % self.settings.every == 0


def open_sets(config: RunConfig, encode: PromptEncoder) -> tuple[EvaluationSet, ...]:
    """Read the prompts of every set. Raises `DataError`, `ConfigError`."""
    sets = tuple(_open(f"eval.{index}", settings, encode) for index, settings in enumerate(config.eval))
    for prompt in (prompt for set_ in sets for prompt in set_.prompts):
        profile_of(prompt, config.profiles)
    return sets


def _open(where: str, settings: EvalConfig, encode: PromptEncoder) -> EvaluationSet:
    limit = None if settings.limit == "all" else settings.limit
    try:
        prompts = tuple(islice(settings.data.prompts(encode), limit))
    except DataError as error:
        # the source's errors name [data], but this one is in a table of [[eval]]
        raise DataError(relocate_message(str(error), settings.data, f"{where}.data")) from None
    if not prompts:
        raise DataError(f"{where}.data: has no prompt to evaluate")
    return EvaluationSet(settings=settings, prompts=prompts, values=read_split_values(settings, prompts, where))


def read_split_values(settings: EvalConfig, prompts: Sequence[Prompt], where: str) -> tuple[str, ...]:
    """Return each prompt's value of the column ``by``; empty if results are not split. Raises `ConfigError`."""
    if not settings.by:
        return ()
    found = [_value(prompt, settings.by) for prompt in prompts]
    different = len(set(found))
    if set(found) == {NO_VALUE}:
        has = ", ".join(sorted({name for prompt in prompts for name in prompt.metadata})) or "none"
        raise ConfigError(f"{where}.by: no row has a column {settings.by!r}; columns are {has}")
    if different > MAX_VALUES:
        raise ConfigError(
            f"{where}.by: must have at most {MAX_VALUES} values, but column {settings.by!r} has {different}; choose a "
            "coarser column"
        )
    return tuple(found)


def _value(prompt: Prompt, column: str) -> str:
    value: object = prompt.metadata
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return NO_VALUE if value is None else str(value).replace("/", "_")
