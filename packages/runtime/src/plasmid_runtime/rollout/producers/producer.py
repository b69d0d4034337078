"""Where the loop gets its prompt groups: what every producer promises."""

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
class Taken:
    """Groups to train on, and those that were dropped since the last take."""

    groups: tuple[GroupRef, ...]
    """New ones in order of their draw, fewer than asked for only if the data have ended. With ``[reuse]`` there are
    groups of earlier batches between them."""
    dropped: tuple[GroupRef, ...]
    """With the reason in ``dropped_by``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else is worth logging about them."""

    @property
    def new(self) -> tuple[GroupRef, ...]:
        """The groups that were not trained on before."""
        return tuple(group for group in self.groups if not group.uses)


class Producer(Protocol):
    """What the loop asks for groups."""

    async def take(self, count: int, *, version: int) -> Taken:
        """Wait for ``count`` groups that may be trained on at this policy version."""
        ...

    def release(self, count: int, *, version: int) -> None:
        """The weights trained on this many groups have reached the engine, as this version."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything but finished groups, which `finished` lists."""
        ...

    def finished(self) -> tuple[GroupRef, ...]:
        """Groups that are ready but not taken, and those that were dropped since the last take."""
        ...

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        """Continue from what `state` and `finished` gave at one moment; call it before the first take."""
        ...

    async def close(self) -> None:
        """Abandon what is in flight."""
        ...


@dataclass(slots=True)
class DropLimit:
    """Ends a run whose filters drop everything, or whose rollouts all fail."""

    limit: int
    """Groups in a row that may be dropped."""
    failed_limit: int
    """Groups in a row that may fail whole: one batch of them is no bad luck any more."""
    reasons: Counter[str] = field(default_factory=Counter)

    def kept(self) -> None:
        """A group passed: start counting anew."""
        self.reasons.clear()

    def dropped(self, group: GroupRef) -> None:
        """A group was dropped. Raises `PlasmidError` at the limit."""
        self.reasons[group.dropped_by] += 1
        if self.reasons["failed"] >= self.failed_limit and self.reasons["failed"] == self.reasons.total():
            raise EngineError(
                f"rollouts: all samples of {self.reasons['failed']} prompt groups in a row failed; "
                f"the last error was: {group.errors[-1]}"
            )
        if self.reasons.total() >= self.limit:
            why = ", ".join(f"{reason}: {count}" for reason, count in self.reasons.most_common())
            last = f"; the last error was: {group.errors[-1]}" if group.errors else ""
            raise PlasmidError(
                f"filters: {self.limit} groups in a row were dropped ({why}){last}; loosen the filters, "
                "use other prompts, or raise run.max_dropped"
            )


class BoundaryProducer:
    """Half a `producer.Producer`: a resume draws everything again that was drawn since the last batch was trained."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._boundary = draws.state([])

    def release(self, count: int, *, version: int) -> None:
        """What was taken has been trained on."""
        self._boundary = self._draws.state([])

    def state(self) -> dict[str, Any]:
        """As it was when the last batch had been trained."""
        return self._boundary

    def finished(self) -> tuple[GroupRef, ...]:
        """Nothing: whole batches are taken."""
        return ()

    def restore(self, state: Mapping[str, Any], finished: Sequence[GroupRef]) -> None:
        """Continue between the two batches."""
        self._draws.restore(state)
        self._boundary = self._draws.state([])
