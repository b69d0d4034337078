"""A reward that another server computes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, Literal

from plasmid import Prompt, Sample, Score
from plasmid.utils.addresses import shown_url
from plasmid.utils.json_client import ServerFailure
from plasmid.utils.work_clock import Clocks, current_clocks, set_clocks
from pydantic import Field, PrivateAttr

from .web_reward import WebReward

Waiting = tuple[dict[str, Any], "asyncio.Future[Any]", Clocks]
MAX_COMPONENTS = 100
"""Numbers of one answer that become components."""
MAX_NAME = 100
"""Characters of their names."""


class Remote(WebReward):
    """What an HTTP server answers: a number, or an object with one under `key`.

    One sample is posted as ``{"prompt", "messages", "response", "target", "metadata", "sample_id"}``; with
    ``batch_size`` above 1 the server gets ``{"items": [...]}`` and answers with a list, or ``{"scores": [...]}``, in
    the same order. The other numbers of an object become components.
    """

    kind: Literal["remote"] = "remote"
    key: str = ""
    """Name of the value in answers that are objects; empty if answers are numbers."""
    batch_size: int = Field(1, ge=1)
    """Samples of one request."""
    batch_wait_s: float = Field(0.02, ge=0)
    """Longest time that a sample waits for others to fill its request."""
    _waiting: list[Waiting] = PrivateAttr(default_factory=list)
    _tasks: set[asyncio.Task[None]] = PrivateAttr(default_factory=set)

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        item = {
            "prompt": prompt.text,
            "messages": [dict(message) for message in prompt.messages],
            "response": sample.text,
            "target": prompt.target,
            "metadata": dict(prompt.metadata),
            "sample_id": sample.id,
        }
        try:
            answer = await (self.client().post(item) if self.batch_size == 1 else self._in_batch(item))
            return self._score(answer)
        except ServerFailure as failure:
            return self.failed(failure)

    async def _in_batch(self, item: dict[str, Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future, current_clocks()))
        if len(self._waiting) >= self.batch_size:
            self._start(0.0)
        elif len(self._waiting) == 1:
            self._start(self.batch_wait_s)
        return await future

    def _start(self, wait_s: float) -> None:
        batch = self._waiting
        if wait_s == 0:
            self._waiting = []
        task = asyncio.get_running_loop().create_task(self._post(batch, wait_s))
        self._tasks.add(task)  # a loop keeps only weak references
        task.add_done_callback(self._tasks.discard)

    async def _post(self, batch: list[Waiting], wait_s: float) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
            if batch is not self._waiting:
                return  # it was full before
            self._waiting = []
        set_clocks([clocks for _, _, clocks in batch])
        try:
            answer = await self.client().post({"items": [item for item, _, _ in batch]})
            scores = answer.get("scores") if isinstance(answer, Mapping) else answer
            if not isinstance(scores, list) or len(scores) != len(batch):
                raise ServerFailure(
                    f"{shown_url(self.url)}: must answer with a list of {len(batch)} scores, got {str(answer)[:100]}"
                )
        except Exception as error:  # noqa: BLE001  boundary: raised where the samples are scored
            for _, future, _ in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future, _), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)

    def _score(self, answer: Any) -> Score:
        where = shown_url(self.url)
        parts: dict[str, float] = {}
        value = answer
        if isinstance(answer, Mapping):
            parts = _components(where, answer)
            if not self.key:
                raise ServerFailure(f"{where}: answered with an object ({', '.join(answer)[:100]}); set key")
            value = answer.get(self.key)
        elif self.key:
            raise ServerFailure(f"{where}: answered {str(answer)[:100]}, an object with {self.key!r} was expected")
        if not _is_number(value):
            raise ServerFailure(f"{where}: {self.key or 'the answer'} must be a finite number, got {str(value)[:100]}")
        return Score(value=float(value), components=parts)


def _components(where: str, answer: Mapping[str, Any]) -> dict[str, float]:
    parts = {name: float(value) for name, value in answer.items() if _is_number(value)}
    if len(parts) > MAX_COMPONENTS:
        raise ServerFailure(f"{where}: answered with {len(parts)} numbers, at most {MAX_COMPONENTS} become components")
    if any(len(name) > MAX_NAME or not name.isprintable() for name in parts):
        raise ServerFailure(f"{where}: names of numbers must be at most {MAX_NAME} characters that can be printed")
    return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)
