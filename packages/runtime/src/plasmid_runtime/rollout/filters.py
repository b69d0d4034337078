"""Filters, asked one after another."""

from __future__ import annotations

from collections.abc import Sequence

from plasmid.components import Filter
from plasmid.errors import RewardError, one_line
from plasmid.types import PromptGroup, StopReason


class FilterChain:
    """The filters of a recipe. Two with the same reason are numbered, so that their counts stay apart."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self._filters = tuple(filters)
        reasons = [filter_.reason for filter_ in filters]
        self._reasons = [r if reasons.count(r) == 1 else f"{r}-{reasons[:i].count(r)}" for i, r in enumerate(reasons)]

    def dropped_by(self, group: PromptGroup) -> str:
        """The reason of the first filter that drops the group, ``failed`` if all its rollouts did, or nothing.

        Raises `RewardError` if a filter raises.
        """
        if all(sample.stop_reason is StopReason.ERROR for sample in group.samples):
            return "failed"
        for index, keep in enumerate(self._filters):
            try:
                kept = keep(group)
            except Exception as error:  # boundary: filters are users' code
                where = f"filters.{index} ({self._reasons[index]})"
                raise RewardError(f"{where}: raised on prompt {group.prompt.id}: {one_line(error)}") from error
            if not kept:
                return self._reasons[index]
        return ""
