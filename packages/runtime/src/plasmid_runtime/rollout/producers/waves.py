"""On-policy sampling in waves, with no surplus."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from plasmid.types.batch import GroupRef
from plasmid.utils.waiting import run_together

from .draws import Draw, Draws
from .producer import BoundaryProducer, DropLimit, ProducedGroups, RollOut

Expect = Callable[[Sequence[Draw]], Awaitable[None]]


class WaveProducer(BoundaryProducer):
    """On-policy: draw the missing groups, wait for all of them, then draw replacements for filtered ones, and so on.

    Since there is no surplus, draws depend only on the data and the filters, which makes exact resume possible.
    """

    def __init__(self, draws: Draws, roll_out: RollOut, expect: Expect, *, limit: DropLimit) -> None:
        super().__init__(draws)
        self._roll_out, self._expect, self._limit = roll_out, expect, limit

    async def take(self, count: int, *, version: int) -> ProducedGroups:
        await self._begin_take()
        kept: list[GroupRef] = []
        dropped: list[GroupRef] = []
        while len(kept) < count:
            wave = await self._draws.draw(count - len(kept))
            if not wave:
                break
            for draw, group in zip(wave, await self._run(wave), strict=True):
                self._draws.finish(draw, group)
                if group.dropped_by:
                    dropped.append(group)
                    self._limit.count_dropped(group)
                else:
                    kept.append(group)
                    self._limit.count_kept()
        await self._draws.settle()
        return ProducedGroups(groups=tuple(kept), dropped=tuple(dropped))

    async def _run(self, wave: list[Draw]) -> list[GroupRef]:
        await self._expect(wave)
        return await run_together(self._roll_out(draw) for draw in wave)

    async def close(self) -> None:
        """Do nothing: nothing is in flight outside `take`."""
