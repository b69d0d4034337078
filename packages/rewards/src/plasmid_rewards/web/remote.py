"""Reward computed by an HTTP server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from plasmid import Prompt, RecipeView, Sample, Score
from plasmid.utils.addresses import redact_url
from plasmid.utils.json_client import ServerFailure
from plasmid.utils.work_clock import Clocks, current_clocks, set_clocks
from pydantic import Field, PrivateAttr

from .web_reward import WebReward

Waiting = tuple[dict[str, Any], "asyncio.Future[Any]", Clocks]
MAX_COMPONENTS = 100
"""Maximum number of components from one answer."""
MAX_NAME = 100
"""Maximum length of a component name, in characters."""


class Remote(WebReward):
    """The answer of an HTTP server: a number, or an object that has one under `key`.

    One sample is posted as ``{"prompt", "messages", "response", "target", "metadata", "sample_id"}``. With
    ``batch_size`` above 1 the server gets ``{"items": [...]}`` and answers with a list, or ``{"scores": [...]}``, in
    the same order. All other numbers of an object become components.
    """

    kind: Literal["remote"] = "remote"
    fields: Literal["plasmid", "slime"] = "plasmid"
    """Format of a request. ``slime`` posts ``{"prompt", "response", "label"}`` for each sample, as slime's remote
    reward does, so that its servers work unchanged."""
    key: str = ""
    """Key of the value in answers that are objects; empty if answers are numbers."""
    batch_size: int = Field(1, ge=1)
    """Number of samples per request."""
    batch_wait_s: float = Field(0.02, ge=0)
    """Maximum time that a sample waits for its request to fill up, in seconds."""
    _waiting: list[Waiting] = PrivateAttr(default_factory=list)
    _tasks: set[asyncio.Task[None]] = PrivateAttr(default_factory=set)

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.fields == "slime" and self.batch_size > 1:
            yield f"batch_size: must be 1 with fields = 'slime', got {self.batch_size}: slime posts single samples"

    async def __call__(self, prompt: Prompt, sample: Sample) -> Score:
        item: dict[str, Any] = {"prompt": prompt.text, "response": sample.text}
        if self.fields == "slime":
            item["label"] = prompt.target
        else:
            item |= {
                "messages": [dict(message) for message in prompt.messages],
                "target": prompt.target,
                "metadata": dict(prompt.metadata),
                "sample_id": sample.id,
            }
        try:
            answer = await (self.client().post(item) if self.batch_size == 1 else self._in_batch(item))
            return self._score(answer)
        except ServerFailure as failure:
            return self.failure_score(failure)

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
        self._tasks.add(task)  # the event loop keeps only weak references
        task.add_done_callback(self._tasks.discard)

    async def _post(self, batch: list[Waiting], wait_s: float) -> None:
        if wait_s:
            await asyncio.sleep(wait_s)
            if batch is not self._waiting:
                return  # the batch became full and was sent before
            self._waiting = []
        set_clocks([clocks for _, _, clocks in batch])
        try:
            answer = await self.client().post({"items": [item for item, _, _ in batch]})
            scores = answer.get("scores") if isinstance(answer, Mapping) else answer
            if not isinstance(scores, list) or len(scores) != len(batch):
                raise ServerFailure(
                    f"{redact_url(self.url)}: must answer with a list of {len(batch)} scores, got {str(answer)[:100]}"
                )
        except Exception as error:  # noqa: BLE001  boundary: raised again where the samples are scored
            for _, future, _ in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future, _), score in zip(batch, scores, strict=True):
            if not future.done():
                future.set_result(score)

    def _score(self, answer: Any) -> Score:
        where = redact_url(self.url)
        parts: dict[str, float] = {}
        value = answer
        if isinstance(answer, Mapping):
            parts = _components(where, answer)
            if not self.key:
                raise ServerFailure(f"{where}: answered with an object ({', '.join(answer)[:100]}); set key")
            value = answer.get(self.key)
        elif self.key:
            raise ServerFailure(f"{where}: answered {str(answer)[:100]}, expected an object with {self.key!r}")
        if not _is_number(value):
            raise ServerFailure(f"{where}: {self.key or 'the answer'} must be a finite number, got {str(value)[:100]}")
        return Score(value=float(value), components=parts)


def _components(where: str, answer: Mapping[str, Any]) -> dict[str, float]:
    parts = {name: float(value) for name, value in answer.items() if _is_number(value)}
    if len(parts) > MAX_COMPONENTS:
        raise ServerFailure(f"{where}: answered with {len(parts)} numbers, at most {MAX_COMPONENTS} are allowed")
    if any(len(name) > MAX_NAME or not name.isprintable() for name in parts):
        raise ServerFailure(f"{where}: names of numbers must have at most {MAX_NAME} printable characters")
    return parts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)
