"""``[reuse]``: training again on groups of earlier batches."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from ..components import Settings


class ReuseConfig(Settings):
    """``[reuse]``: groups that were trained on go back to a pool, and join later batches.

    They join a batch besides its `run.prompts_per_batch` new groups, drawn at random without replacement. Their tokens
    count as drawn by the policy that drew them, so the algorithm must correct for it (experience replay).
    """

    groups_per_batch: int = Field(ge=1)
    """Groups of the pool that join each batch; fewer while the pool holds fewer."""
    max_age: int = Field(4, ge=1)
    """Policy versions that the oldest token of a reused group may lag behind the trainer."""
    max_uses: int = Field(2, ge=2)
    """Batches that a group is trained in, the first one included."""
    capacity: int = Field(1024, ge=1)
    """Groups in the pool; beyond it the oldest leave. They stay in memory, and are in every checkpoint."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.groups_per_batch > self.capacity:
            yield f"groups_per_batch = {self.groups_per_batch} is more than capacity = {self.capacity} holds; raise it"
