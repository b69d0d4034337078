"""Interface of producers, which supply the training loop with prompt groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from plasmid.errors import EngineError, PlasmidError
from plasmid.types.batch import GroupRef

from .draws import Draw, Draws

RollOut = Callable[[Draw], Coroutine[Any, Any, GroupRef]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProducedGroups:
    """Groups to train on, and groups dropped since the last take."""

    groups: tuple[GroupRef, ...]
    """New groups in draw order, fewer than requested only at the end of the data. With ``[reuse]``, groups of earlier
    batches are mixed in."""
    dropped: tuple[GroupRef, ...]
    """Dropped groups, with the reason in ``dropped_by``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Additional metrics to log."""

    @property
    def new(self) -> tuple[GroupRef, ...]:
        """The groups that have not been trained on before."""
        return tuple(group for group in self.groups if not group.uses)


class Producer(Protocol):
    """Supplies the training loop with prompt groups."""

    async def take(self, count: int, *, version: int) -> ProducedGroups:
        """Wait for ``count`` groups that may be trained on at this policy version."""

    def put_back(self, taken: ProducedGroups) -> None:
        """Undo the last take, for the last `snapshot`: its groups have not been trained on. No take may follow."""

    def release(self, count: int, *, version: int) -> None:
        """Free the slots of ``count`` groups: the engine has received the weights trained on them, as ``version``."""

    async def snapshot(self) -> tuple[dict[str, Any], tuple[GroupRef, ...]]:
        """Return a consistent state, and the finished groups to store with it.

        These groups are ready but not taken, or were dropped since the last take.
        """

    async def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        """Continue from a `snapshot`. Call this before the first take."""

    def depths(self) -> Mapping[str, int]:
        """Return the lengths of the queues, by name."""

    async def close(self) -> None:
        """Cancel everything in flight."""


@dataclass(slots=True)
class DropLimit:
    """Ends a run in which filters drop all groups or all rollouts fail."""

    limit: int
    """Maximum number of consecutive dropped groups."""
    failed_limit: int
    """Maximum number of consecutive groups in which all rollouts fail, usually one batch."""
    reasons: Counter[str] = field(default_factory=Counter)

    def count_kept(self) -> None:
        """Count a group that passed the filters, which resets the counters."""
        self.reasons.clear()

    def count_dropped(self, group: GroupRef) -> None:
        """Count a dropped group. Raises `PlasmidError` at the limit."""
        self.reasons[group.dropped_by] += 1
        if self.reasons["failed"] >= self.failed_limit and self.reasons["failed"] == self.reasons.total():
            raise EngineError(
                f"rollouts: all samples of {self.reasons['failed']} consecutive prompt groups failed; "
                f"the last error: {group.errors[-1]}"
            )
        if self.reasons.total() >= self.limit:
            why = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.most_common())
            last = f"; the last error: {group.errors[-1]}" if group.errors else ""
            raise PlasmidError(
                f"filters: {self.limit} consecutive groups were dropped ({why}){last}; loosen the filters, "
                "use other prompts, or raise run.max_dropped"
            )


class BoundaryProducer:
    """Partial implementation of `Producer` that, on resume, repeats all draws since the last trained batch."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._boundary: dict[str, Any] | None = None
        """State before the first batch that is taken but not yet trained; None without such a batch."""
        self._before_last: dict[str, Any] | None = None
        """State before the last take."""

    async def _begin_take(self) -> None:
        self._before_last = await self._draws.state({})
        if self._boundary is None:
            self._boundary = self._before_last

    def put_back(self, taken: ProducedGroups) -> None:
        """Repeat the draws of the last batch on resume. Call `release` first if earlier batches were trained."""
        if self._boundary is None:
            self._boundary = self._before_last

    def release(self, count: int, *, version: int) -> None:
        """Mark the taken batches as trained."""
        self._boundary = None

    async def snapshot(self) -> tuple[dict[str, Any], tuple[GroupRef, ...]]:
        """Return the state after the last trained batch. Batches are taken whole, so no finished groups remain."""
        return (await self._draws.state({}) if self._boundary is None else self._boundary), ()

    async def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        """Continue after the last trained batch."""
        await self._draws.restore(state)

    def depths(self) -> Mapping[str, int]:
        """Return nothing: batches are drawn and taken whole, without queues."""
        return {}
