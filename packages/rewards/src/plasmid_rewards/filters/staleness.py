"""Leaves out groups that took too many policy versions to finish."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from plasmid import Filter, PromptGroup, RunConfig
from pydantic import Field


class Staleness(Filter):
    """Keeps groups whose oldest token is at most some policy versions older than their newest one.

    It is asked when a group is finished, and frees the group's slot at once; `run.max_staleness` is the bound at the
    moment of training.
    """

    kind: Literal["staleness"] = "staleness"
    max_versions: int = Field(ge=0)
    """Most versions between the oldest and the newest token of a group."""

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        if self.max_versions >= config.run.max_staleness:
            yield (
                f"max_versions: {self.max_versions} drops nothing that run.max_staleness = {config.run.max_staleness} "
                "lets pass; lower it, or remove the filter"
            )

    def __call__(self, group: PromptGroup) -> bool:
        versions = [span.version for sample in group.samples for span in sample.versions]
        return not versions or max(versions) - min(versions) <= self.max_versions
