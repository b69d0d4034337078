"""Client of the engine in a rollout worker: batches requests into one call per engine process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from plasmid.errors import EngineError
from plasmid.protocols import Actor, call
from plasmid.types import Completion, GenerateRequest

from .process.worker import EngineWorker

ANSWER_S = 600.0
"""Time limit for an engine process to react, in seconds; one step of a large model on a CPU may take minutes."""


class RequestBatcher:
    """Batches the requests of one event loop and matches completions to them."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.loop = asyncio.get_running_loop()
        self._actors = actors
        self._id = uuid.uuid4().hex
        self._routes: dict[str, int] = {}
        self._open: list[dict[str, asyncio.Future[Completion]]] = [{} for _ in actors]
        """Unanswered requests of each engine."""
        self._outgoing: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []
        self._leaving: list[tuple[str, asyncio.Future[None]]] = []
        self._flushing = False
        self._collectors: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Send a request together with others that are ready, and wait for its completion."""
        answer: asyncio.Future[Completion] = self.loop.create_future()
        self._outgoing.append((request, answer))
        self._schedule_flush()
        return await answer

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """End sessions, in one call together with requests that are ready."""
        done: list[asyncio.Future[None]] = [self.loop.create_future() for _ in session_ids]
        self._leaving += zip(session_ids, done, strict=True)
        self._schedule_flush()
        await asyncio.gather(*done)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests, on any of the engines."""
        await asyncio.gather(*(call(actor, ANSWER_S, EngineWorker.abort, request_ids) for actor in self._actors))

    async def fetch_partial(self, request_ids: Sequence[str]) -> list[Completion]:
        """Return the tokens generated so far by running requests: see `EngineClient.fetch_partial`."""
        asked = [[id_ for id_ in request_ids if id_ in opened] for opened in self._open]
        unsent = set(request_ids).difference(*asked)
        found = await asyncio.gather(
            *(
                call(actor, ANSWER_S, EngineWorker.fetch_partial, ids)
                for actor, ids in zip(self._actors, asked, strict=True)
                if ids
            )
        )
        return [*(Completion.without_tokens(id_) for id_ in unsent), *(part for parts in found for part in parts)]

    def _schedule_flush(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._keep(self.loop.create_task(self._flush()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self) -> None:
        await asyncio.sleep(0)  # let tasks that are ready add their requests
        self._flushing = False
        outgoing, self._outgoing = self._outgoing, []
        leaving, self._leaving = self._leaving, []
        futures: list[asyncio.Future[Any]] = [
            *(answer for _, answer in outgoing),
            *(done for _, done in leaving),
        ]
        try:
            routes = await self._route([*(r.session_id for r, _ in outgoing), *(s for s, _ in leaving)])
            parts = [self._part(i, outgoing, leaving, routes) for i in sorted(set(routes.values()))]
            await asyncio.gather(*(self._submit(*part) for part in parts))
            await self._forget([session for session, _ in leaving])
        except Exception as error:  # noqa: BLE001  boundary: each caller gets the error of the shared call
            _fail(futures, error)
        for _, done in leaving:
            if not done.done():
                done.set_result(None)

    def _part(self, engine: int, outgoing: Any, leaving: Any, routes: dict[str, int]) -> Any:
        requests = [(r, answer) for r, answer in outgoing if routes[r.session_id] == engine]
        return engine, requests, [session for session, _ in leaving if routes[session] == engine]

    async def _submit(
        self, engine: int, requests: list[tuple[GenerateRequest, asyncio.Future[Completion]]], ended_sessions: list[str]
    ) -> None:
        wanted = [(request, answer) for request, answer in requests if not answer.done()]
        opened = self._open[engine]
        for request, answer in wanted:
            if request.id in opened:
                answer.set_exception(EngineError(f"request {request.id}: already running; request ids must be unique"))
            else:
                opened[request.id] = answer
        sent = [request for request, answer in wanted if opened.get(request.id) is answer]
        try:
            await call(self._actors[engine], ANSWER_S, EngineWorker.submit, self._id, sent, ended_sessions)
        except Exception as error:  # boundary: only these requests fail
            _fail([opened.pop(request.id) for request in sent], error)
            if ended_sessions:
                raise
        if opened and engine not in self._collectors:
            self._collectors[engine] = self.loop.create_task(self._collect(engine))

    async def _collect(self, engine: int) -> None:
        """Fetch completions as long as there are open requests."""
        opened = self._open[engine]
        try:
            while opened:
                for completion in await call(self._actors[engine], ANSWER_S, EngineWorker.collect, self._id):
                    answer = opened.pop(completion.request_id, None)
                    if answer is not None and not answer.done():
                        answer.set_result(completion)
        except Exception as error:  # noqa: BLE001  boundary: the engine has stopped; waiting callers get the error
            _fail(list(opened.values()), error)
            opened.clear()
        finally:
            del self._collectors[engine]

    async def _route(self, sessions: Sequence[str]) -> dict[str, int]:
        if len(self._actors) == 1:
            return dict.fromkeys(sessions, 0)
        new = sorted({session for session in sessions if session not in self._routes})
        if new:
            engines = await call(self._actors[0], ANSWER_S, EngineWorker.route, new)
            self._routes |= dict(zip(new, engines, strict=True))
        return {session: self._routes[session] for session in sessions}

    async def _forget(self, sessions: Sequence[str]) -> None:
        if len(self._actors) == 1 or not sessions:
            return
        for session in sessions:
            self._routes.pop(session, None)
        await call(self._actors[0], ANSWER_S, EngineWorker.forget, list(sessions))


def _fail(futures: Sequence[asyncio.Future[Any]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


class HFClient:
    """Implements `EngineClient`. Picklable; holds only the handles of the engine processes."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self._actors = tuple(actors)
        self._batcher: RequestBatcher | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return HFClient, (self._actors,)

    def _loop_batcher(self) -> RequestBatcher:
        """Return the batcher of the running event loop, because futures belong to one loop."""
        if self._batcher is None or self._batcher.loop is not asyncio.get_running_loop():
            self._batcher = RequestBatcher(self._actors)
        return self._batcher

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate a continuation of the request's tokens."""
        return await self._loop_batcher().generate(request)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early. Returns once their completions are under way."""
        await self._loop_batcher().abort(request_ids if request_ids == "all" else tuple(request_ids))

    async def fetch_partial(self, request_ids: Sequence[str]) -> Sequence[Completion]:
        """Return the tokens generated so far by running requests: see `EngineClient.fetch_partial`."""
        return await self._loop_batcher().fetch_partial(tuple(request_ids))

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Declare that these sessions send no further requests."""
        if session_ids:
            await self._loop_batcher().end_sessions(tuple(session_ids))

    async def disconnect(self) -> None:
        """Do nothing: actors have no connections to close."""
