"""Buffer policies: the order in which finished groups are trained on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from plasmid.components import RecipeView
from plasmid.components.buffer_policy import BufferPolicy
from plasmid.errors import PlasmidError, one_line
from plasmid.plugins.functions import FunctionName
from plasmid.types.batch import GroupRef
from pydantic import Field, field_validator

SPREAD = "reward-spread"


class OldestFirst(BufferPolicy):
    """Trains on finished groups in the order of their draws."""

    kind: Literal["oldest-first"] = "oldest-first"

    def priority(self, group: GroupRef, *, version: int) -> float:
        return 0.0


class FreshestFirst(BufferPolicy):
    """Trains first on the groups whose oldest token is the newest. Other groups wait and reach the staleness bound
    sooner. Only effective with `run.over_sampling` above 1, which provides more groups than a batch needs.
    """

    kind: Literal["freshest-first"] = "freshest-first"

    def priority(self, group: GroupRef, *, version: int) -> float:
        return float(version if group.oldest_version is None else group.oldest_version)


class Priority(BufferPolicy):
    """Trains on the groups with the highest priority first. Only effective with `run.over_sampling` above 1."""

    kind: Literal["priority"] = "priority"
    by: str = SPREAD
    """Priority of a group: ``reward-spread``, the standard deviation of its rewards, or a function, as
    ``module:function`` or ``file.py:function``. It receives a `GroupRef` (ids, rewards, lengths, versions) and returns
    a number."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of the function."""

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

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
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
