"""On-policy groups: in waves, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from plasmid.types.batch import GroupRef
from plasmid.utils.waiting import together

from .draws import Draw, Draws
from .producer import BoundaryProducer, DropLimit, RollOut, Taken

Expect = Callable[[Sequence[Draw]], Awaitable[None]]


class WaveProducer(BoundaryProducer):
    """On-policy: draw what is missing, wait for all of it, draw replacements for what was filtered, and so on.

    No surplus is kept, and what is drawn depends on nothing but the data and the filters: exact resume rests on that.
    """

    def __init__(self, draws: Draws, roll_out: RollOut, expect: Expect, *, limit: DropLimit) -> None:
        super().__init__(draws)
        self._roll_out, self._expect, self._limit = roll_out, expect, limit

    async def take(self, count: int, *, version: int) -> Taken:
        kept: list[GroupRef] = []
        dropped: list[GroupRef] = []
        while len(kept) < count:
            wave = self._wave(count - len(kept))
            if not wave:
                break
            for draw, group in zip(wave, await self._run(wave), strict=True):
                self._draws.finished(draw, group)
                if group.dropped_by:
                    dropped.append(group)
                    self._limit.dropped(group)
                else:
                    kept.append(group)
                    self._limit.kept()
        return Taken(groups=tuple(kept), dropped=tuple(dropped))

    def _wave(self, count: int) -> list[Draw]:
        draws = [self._draws.draw() for _ in range(count)]
        return [draw for draw in draws if draw is not None]

    async def _run(self, wave: list[Draw]) -> list[GroupRef]:
        await self._expect(wave)
        return await together(self._roll_out(draw) for draw in wave)

    async def close(self) -> None:
        """Nothing is in flight outside `take`, which ends what it began."""
