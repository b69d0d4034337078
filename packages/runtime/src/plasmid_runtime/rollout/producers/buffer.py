"""In which order groups that wait for training are taken."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from plasmid.components.buffer_policy import BufferPolicy
from plasmid.errors import PlasmidError, one_line
from plasmid.plugins.functions import FunctionName
from plasmid.types.batch import GroupRef
from pydantic import Field, field_validator

SPREAD = "reward-spread"


class OldestFirst(BufferPolicy):
    """Groups are trained on in the order of their draws, as far as they are finished."""

    kind: Literal["oldest-first"] = "oldest-first"

    def priority(self, group: GroupRef, *, version: int) -> float:
        return 0.0


class FreshestFirst(BufferPolicy):
    """Groups whose oldest token is of the newest policy version are trained on first.

    The others wait, and are past the bound sooner: it takes `run.over_sampling` above 1 to have a choice.
    """

    kind: Literal["freshest-first"] = "freshest-first"

    def priority(self, group: GroupRef, *, version: int) -> float:
        return float(version if group.oldest_version is None else group.oldest_version)


class Priority(BufferPolicy):
    """Groups that are worth most are trained on first. It takes `run.over_sampling` above 1 to have a choice."""

    kind: Literal["priority"] = "priority"
    by: str = SPREAD
    """What a group is worth: ``reward-spread`` is the standard deviation of its rewards; else ``module:function`` or
    ``file.py:function``, which gets the `GroupRef` (ids, rewards, lengths, versions) and returns a number."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Further arguments of the function by name."""

    @field_validator("by")
    @classmethod
    def _can_be_loaded(cls, value: str) -> str:
        if value == SPREAD:
            return value
        try:
            FunctionName.parse(value).load()
        except ValueError:
            raise ValueError(
                f"must be {SPREAD!r} or look like module:function or file.py:function, got {value!r}"
            ) from None
        except Exception as error:  # boundary: importing runs users' code
            raise ValueError(f"{value} cannot be loaded: {one_line(error)}") from error
        return value

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.by == SPREAD:
            if self.arguments:
                yield f"arguments has no effect with by = {SPREAD!r}; remove it"
            return
        try:
            inspect.signature(FunctionName.parse(self.by).load()).bind(None, **self.arguments)
        except TypeError as error:
            yield f"arguments: {self.by} is called with (group) and {sorted(self.arguments)}: {error}"

    def priority(self, group: GroupRef, *, version: int) -> float:
        if self.by == SPREAD:
            return float(np.std(group.rewards)) if len(group.rewards) else 0.0
        try:
            value = float(FunctionName.parse(self.by).load()(group, **self.arguments))
        except Exception as error:  # boundary: users' code
            raise PlasmidError(f"buffer.by: {self.by} raised on group {group.id}: {one_line(error)}") from error
        if not math.isfinite(value):
            raise PlasmidError(f"buffer.by: {self.by} must return a finite number, got {value} for group {group.id}")
        return value
