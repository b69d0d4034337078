"""The half of the engine that rollout workers hold: token ids in, token ids and log-probabilities out, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import orjson
from plasmid.errors import EngineError, one_line
from plasmid.types import Completion, GenerateRequest

from .api import Api, read_answer
from .bulletin import BulletinFile
from .wording import completion, finished, request_body

WAIT_S = 0.05
"""Between two looks for a server that may be asked."""
RETRIED = (502, 503)
"""Answers of a server or router that is starting or has lost its server; the same request may succeed later."""


def _max_bytes(request: GenerateRequest, num_tokens: int) -> int:
    """Largest answer of so many tokens; with kept sets each has a list of token ids."""
    return (1 << 20) + num_tokens * (1 << 16 if request.wants_kept_set else 1 << 10)


class Unavailable(Exception):
    """The server did not take the request, or went away with it; another one may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How the servers are asked."""

    max_requests: int
    seeded: bool
    """Servers draw by the request's seed."""
    has_spans: bool
    """Servers say which version drew each token of a request that went on through a weight sync."""
    keep_session: bool
    """Name the session, so that a router finds the server that has its prefix."""
    api_key: str = field(default="", repr=False)
    """That servers and router ask for."""


class Desk:
    """The client's state on one event loop."""

    def __init__(self, bulletin: BulletinFile, options: ClientOptions) -> None:
        self._bulletin, self._options = bulletin, options
        self._places = asyncio.Semaphore(options.max_requests)
        self._apis: dict[str, Api] = {}
        self._asked: Counter[str] = Counter()
        self._attempt = itertools.count()

    async def ask(self, request: GenerateRequest) -> Completion:
        """Ask one server, or another one if it is gone, until the request's deadline."""
        started = time.monotonic()
        why = "no server was ready"
        async with self._places:
            while (left := request.deadline_s - (time.monotonic() - started)) > 0:
                bulletin = self._bulletin.read()
                if bulletin.error:
                    raise EngineError(f"the engine cannot serve: {bulletin.error}")
                if not (bulletin.is_open and bulletin.urls):
                    await asyncio.sleep(WAIT_S)
                    continue
                room = bulletin.context_length - 1 - len(request.token_ids)
                allowed = min(request.sampling.max_new_tokens - request.num_generated, room)
                if allowed <= 0:
                    return finished(request)
                url = min(bulletin.urls, key=lambda u: self._asked[u])
                try:
                    return await self._ask_one(url, request, allowed, left)
                except Unavailable as error:
                    why = str(error)
                    await asyncio.sleep(WAIT_S)
        return finished(request, error=f"no answer within {request.deadline_s:g} s: {why}")

    async def _ask_one(self, url: str, request: GenerateRequest, allowed: int, limit_s: float) -> Completion:
        # ids are matched by their beginnings: the separator keeps "1" from ending "10"
        rid = f"{request.id}~{os.getpid()}.{next(self._attempt)}"
        body = request_body(request, rid=rid, max_new_tokens=allowed, seeded=self._options.seeded)
        headers = {"X-SMG-Routing-Key": request.session_id} if self._options.keep_session else {}
        api = self._api(url)
        started = time.monotonic()
        self._asked[url] += 1
        try:
            async with asyncio.timeout(limit_s):
                call = api.session().post(f"{api.url}/generate", json=body, headers=headers, allow_redirects=False)
                async with call as reply:
                    if reply.status in RETRIED:
                        raise Unavailable(f"{url} answered {reply.status}")
                    answer = orjson.loads(await read_answer(reply, _max_bytes(request, allowed)))
                    return completion(request, reply.status, answer, has_spans=self._options.has_spans)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise Unavailable(f"{url}: {one_line(error)}") from None
        except TimeoutError:
            await self._end(api, rid)
            seconds = time.monotonic() - started
            return finished(request, error=f"no answer within {request.deadline_s:g} s ({seconds:.0f} s at {url})")
        except asyncio.CancelledError:
            await asyncio.shield(self._end(api, rid))
            raise
        finally:
            self._asked[url] -= 1

    async def _end(self, api: Api, rid: str) -> None:
        """Let the server forget a request that nobody waits for."""
        try:
            await api.abort([rid])
        except EngineError:
            return  # it is gone, and the request with it

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests on every server; those that are gone have none."""
        apis = [self._api(url) for url in self._bulletin.read().servers]
        if request_ids == "all":
            work = [api.abort_all() for api in apis]
        else:
            work = [api.abort([f"{id_}~" for id_ in request_ids]) for api in apis]
        await asyncio.gather(*work, return_exceptions=True)

    async def close(self) -> None:
        """Give the connections back."""
        await asyncio.gather(*(api.close() for api in self._apis.values()))

    def _api(self, url: str) -> Api:
        if url not in self._apis:
            self._apis[url] = Api(url, self._options.api_key)
        return self._apis[url]


class SGLangClient:
    """Implements `EngineClient`. Picklable; keeps nothing but where to look for servers."""

    def __init__(self, bulletin: BulletinFile, options: ClientOptions) -> None:
        self._bulletin, self._options = bulletin, options
        self._desks: dict[asyncio.AbstractEventLoop, Desk] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SGLangClient, (self._bulletin, self._options)

    def _here(self) -> Desk:
        """State of the running loop: connections belong to one. Threads of one process may share this object."""
        loop = asyncio.get_running_loop()
        if loop not in self._desks:
            self._desks[loop] = Desk(self._bulletin, self._options)
        return self._desks[loop]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue the tokens of the request."""
        return await self._here().ask(request)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early; returns when the servers have been told."""
        await self._here().abort(request_ids)

    async def leave(self, session_ids: Sequence[str]) -> None:
        """Nothing is kept of sessions."""

    async def close(self) -> None:
        """Give the connections of this loop back."""
        desk = self._desks.pop(asyncio.get_running_loop(), None)
        if desk is not None:
            await desk.close()
