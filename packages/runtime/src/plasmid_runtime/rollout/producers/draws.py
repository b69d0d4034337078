"""Draws of prompts: numbered, remembered until trained on, and repeatable after a resume."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from plasmid.components import PromptStream
from plasmid.types import Prompt
from plasmid.types.batch import GroupRef
from plasmid.utils.waiting import wait_within

from ...data.data_thread import DataCalls, DirectCalls, await_outcome

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """One prompt taken from the data, to become one prompt group."""

    id: int
    """Serial number over the whole run; the group's id."""
    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ReadAhead:
    """Prompts that have been read before they are drawn."""

    count: int
    state: Future[dict[str, Any]]
    """State of the stream before these prompts."""
    prompts: Future[tuple[list[Prompt], Mapping[str, float]]]
    """The prompts, and the stream's metrics after them."""


class Draws:
    """Numbers the draws of a stream. Its state is exact and includes prompts that are drawn but not trained on.

    Calls the stream only through ``calls``, in the order of calls to this class. Await a draw before requesting the
    next one or the state.
    """

    def __init__(self, stream: PromptStream, calls: DataCalls | None = None, *, timeout_s: float = 600.0) -> None:
        self._stream, self.calls, self._timeout_s = stream, calls or DirectCalls(), timeout_s
        self._next = 0
        self._again: list[Draw] = []
        self._learning: list[Future[None]] = []
        self._metrics: Mapping[str, float] = {}
        self._ahead: _ReadAhead | None = None
        self._closed = False
        self._submit(lambda: None).result()

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        """Call the stream, and store its metrics afterwards."""

        def work() -> T:
            result = call()
            self._metrics = dict(self._stream.metrics())
            return result

        return self.calls.submit(work)

    async def draw(self, count: int) -> list[Draw]:
        """Return the next draws, fewer only at the end of the data: first those restored by a resume, then new ones."""
        read = self._read(max(0, count - len(self._again)))
        prompts = await wait_within(self._timeout_s, f"data: {count} prompts (run.data_timeout_s)", read)
        drawn, self._again = self._again[:count], self._again[count:]
        for prompt in prompts:
            drawn.append(Draw(id=self._next, prompt=prompt))
            self._next += 1
        await self.settle()
        return drawn

    async def _read(self, count: int) -> list[Prompt]:
        """Return new prompts: those read ahead, if any."""
        if self._ahead is None:
            return await await_outcome(self._submit(lambda: self._prompts(count)))
        if count != self._ahead.count:
            raise ValueError(f"{self._ahead.count} prompts were read ahead, but {count} were requested")
        prompts, self._metrics = await await_outcome(self._ahead.prompts)
        self._ahead = None
        return prompts

    def read_ahead(self, count: int) -> None:
        """Start to read the prompts of the next `draw` of ``count``, and return immediately.

        Until that draw, `state` and `metrics` do not include them. Only for producers that do not report rewards to the
        data (`finish`), because rewards could change the next prompts.
        """
        state = self.calls.submit(lambda: dict(self._stream.state()))
        missing = max(0, count - len(self._again))

        def read() -> tuple[list[Prompt], Mapping[str, float]]:
            return self._prompts(missing), dict(self._stream.metrics())

        self._ahead = _ReadAhead(count=missing, state=state, prompts=self.calls.submit(read))

    def close(self) -> None:
        """Stop reading ahead after the current row."""
        self._closed = True

    def _prompts(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count and not self._closed and (prompt := self._stream.draw()) is not None:
            prompts.append(prompt)
        return prompts

    async def redraw(self, group: GroupRef) -> Draw:
        """Return the draw of a group, to roll it out again."""
        return Draw(id=group.id, prompt=await await_outcome(self._submit(lambda: self._stream.prompt(group.prompt_id))))

    def finish(self, draw: Draw, group: GroupRef) -> None:
        """Report the rewards of a draw to the data, before the next draw.

        Call this once, when the group has been scored. Errors of the data are raised by the next awaited method.
        """
        if group.num_samples:
            self._learning.append(self._submit(lambda: self._stream.learn(draw.prompt, group.rewards.tolist())))

    async def settle(self) -> None:
        """Wait until all finished draws have been reported to the data."""
        learning, self._learning = self._learning, []
        for future in learning:
            await await_outcome(future)

    def state(self, pending: Mapping[int, str]) -> Awaitable[dict[str, Any]]:
        """Return the state of the data at the time of this call, and the draws with unfinished groups.

        ``pending`` has the prompt ids of these draws by draw id; draws restored by a resume are added.
        """
        waiting = {**pending, **{draw.id: draw.prompt.id for draw in self._again}}
        known = {"next": self._next, "pending": [{"id": id_, "prompt": waiting[id_]} for id_ in sorted(waiting)]}
        future = self._submit(lambda: dict(self._stream.state())) if self._ahead is None else self._ahead.state

        async def state() -> dict[str, Any]:
            await self.settle()
            return {**known, "stream": await await_outcome(future)}

        return state()

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises `CheckpointError` if the data has changed."""

        def work() -> list[Draw]:
            self._stream.restore(state["stream"])
            return [Draw(id=item["id"], prompt=self._stream.prompt(item["prompt"])) for item in state["pending"]]

        self._again = await await_outcome(self._submit(work))
        self._next = int(state["next"])

    def metrics(self) -> Mapping[str, float]:
        """Return gauges of the data after the last completed call."""
        return self._metrics
