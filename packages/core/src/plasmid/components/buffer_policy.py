"""Base class of buffer policies, which order the finished groups for training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Literal

from ..types.batch import GroupRef
from .base import Component, RecipeView, kind_of


class BufferPolicy(Component, slot="buffer", default_kind="oldest-first"):
    """Determines the order in which finished groups are trained on, selected by ``[buffer] kind = ...``.

    It runs in the driver and sees no tokens. In any order, groups older than `run.max_staleness` are never trained on.
    """

    when_stale: Literal["wait", "drop", "resample"] = "wait"
    """How to enforce run.max_staleness. ``wait``: the trainer waits for groups that would be too old for later
    batches, and trains on them first. ``drop`` discards groups that are too old, which affects long rollouts more than
    short ones. ``resample`` samples their prompts again with the current policy and gives them priority."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if recipe is None or recipe.max_staleness > 0:
            return
        for name, value, default in (
            ("kind", kind_of(self), "oldest-first"),
            ("when_stale", self.when_stale, "wait"),
        ):
            if value != default:
                yield (
                    f"buffer.{name}: {value!r} has no effect with run.max_staleness = 0, where no group waits; remove "
                    "it"
                )

    @abstractmethod
    def priority(self, group: GroupRef, *, version: int) -> float:
        """Return the priority of a group: the highest is trained on first, ties in the order of the draws.

        ``version`` is the trainer's policy version. Called for every waiting group each time a group is taken.
        """
