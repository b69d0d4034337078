"""The half of the engine that rollout workers hold: token ids in, token ids and log-probabilities out, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import numpy as np
import orjson
from plasmid.errors import EngineError, one_line
from plasmid.types import Completion, GenerateRequest, StopReason
from plasmid.types.kept_sets import KeptSet
from plasmid.utils.safe_files import write_text

from .api import HttpApi, read_answer
from .dialect import Dialect

POLL_S = 0.05
"""Time between two looks for a server to ask."""
RETRIED = (502, 503)
"""Answers of a server that is starting, or of a router that has lost its server. A retry may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """State of the engine that rollout workers need."""

    urls: tuple[str, ...] = ()
    """Servers that serve the current policy, or the router in front of them."""
    servers: tuple[str, ...] = ()
    """All servers that may hold requests, for aborts."""
    is_open: bool = True
    """False while no new request may be sent."""
    context_length: int = 0
    """Longest sample in tokens."""
    error: str = ""
    """Why the engine cannot serve any more."""


class EndpointsFile:
    """The file. Picklable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._last = Endpoints(is_open=False)

    def write(self, endpoints: Endpoints) -> None:
        """Replace the file atomically."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps(asdict(endpoints)))

    def read(self) -> Endpoints:
        """Return the latest state. Only looks at the file's date unless it has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._last
        if (seen := (stat.st_mtime_ns, stat.st_ino)) != self._seen:
            found = json.loads(self._path.read_text())
            self._last = Endpoints(**{**found, "urls": tuple(found["urls"]), "servers": tuple(found["servers"])})
            self._seen = seen
        return self._last


def empty_completion(request: GenerateRequest, reason: StopReason, error: str | None = None) -> Completion:
    """Return a completion without tokens."""
    return Completion(
        request_id=request.id,
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        versions=(),
        kept=KeptSet.whole(0) if request.wants_kept_set else None,
        stop_reason=reason,
        error=error,
    )


def failed(request: GenerateRequest, error: str) -> Completion:
    """Return the completion of a request that failed."""
    return empty_completion(request, StopReason.ERROR, error)


def _without_room(request: GenerateRequest) -> Completion:
    if request.num_generated:
        return empty_completion(request, StopReason.LENGTH)
    tokens = len(request.token_ids)
    return failed(request, f"the prompt of {tokens} tokens leaves no room; raise model.max_length or shorten it")


def _max_bytes(request: GenerateRequest, num_tokens: int) -> int:
    """Largest answer with so many tokens. With kept sets, each token has a list of token ids."""
    return (1 << 20) + num_tokens * (1 << 16 if request.wants_kept_set else 1 << 10)


class _UnavailableError(Exception):
    """The server did not take the request, or ended with it. Another one may take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How servers are found and asked."""

    endpoints: EndpointsFile
    dialect: Dialect
    max_requests: int
    """Open at once on each event loop."""
    api_key: str = field(default="", repr=False)


class ServersClient:
    """Implements `EngineClient`. Picklable; threads of one process may share it."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._loops: dict[asyncio.AbstractEventLoop, _LoopClient] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ServersClient, (self._options,)

    def _here(self) -> _LoopClient:
        """Return the state of the running loop, to which its connections belong."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _LoopClient(self._options)
        return self._loops[loop]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Continue the tokens of the request."""
        return await self._here().generate(request)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early. Returns when the servers know."""
        await self._here().abort(request_ids)

    async def leave(self, session_ids: Sequence[str]) -> None:
        """Nothing to do: servers keep nothing of sessions."""

    async def close(self) -> None:
        """Close the connections of this loop."""
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is not None:
            await asyncio.gather(*(api.close() for api in here.apis.values()))


class _LoopClient:
    """The client on one event loop."""

    def __init__(self, options: ClientOptions) -> None:
        self._endpoints, self._dialect, self._key = options.endpoints, options.dialect, options.api_key
        self._slots = asyncio.Semaphore(options.max_requests)
        self.apis: dict[str, HttpApi] = {}
        self._open: Counter[str] = Counter()
        self._attempt = itertools.count()

    async def generate(self, request: GenerateRequest) -> Completion:
        """Ask the server with the fewest open requests, or another if it is gone, until the request's deadline."""
        started = time.monotonic()
        why = "no server was ready"
        async with self._slots:
            while (left := request.deadline_s - (time.monotonic() - started)) > 0:
                endpoints = self._endpoints.read()
                if endpoints.error:
                    raise EngineError(f"the engine cannot serve: {endpoints.error}")
                if not (endpoints.is_open and endpoints.urls):
                    await asyncio.sleep(POLL_S)
                    continue
                room = endpoints.context_length - 1 - len(request.token_ids)
                allowed = min(request.sampling.max_new_tokens - request.num_generated, room)
                if allowed <= 0:
                    return _without_room(request)
                url = min(endpoints.urls, key=lambda u: self._open[u])
                try:
                    return await self._ask(url, request, allowed, left)
                except _UnavailableError as error:
                    why = str(error)
                    await asyncio.sleep(POLL_S)
        return failed(request, f"no answer within {request.deadline_s:g} s: {why}")

    async def _ask(self, url: str, request: GenerateRequest, allowed: int, limit_s: float) -> Completion:
        # ids are matched by prefix: the separator keeps "1" from ending "10"
        rid = f"{request.id}~{os.getpid()}.{next(self._attempt)}"
        path, body, headers = self._dialect.request(request, rid=rid, max_new_tokens=allowed)
        api = self._api(url)
        started = time.monotonic()
        self._open[url] += 1
        try:
            async with asyncio.timeout(limit_s):
                call = api.session().post(api.url + path, json=body, headers=headers, allow_redirects=False)
                async with call as reply:
                    if reply.status in RETRIED:
                        raise _UnavailableError(f"{url} answered {reply.status}")
                    answer = orjson.loads(await read_answer(reply, _max_bytes(request, allowed)))
                    return self._dialect.completion(request, reply.status, answer)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _UnavailableError(f"{url}: {one_line(error)}") from None
        except TimeoutError:
            await self._end(api, rid)
            seconds = time.monotonic() - started
            return failed(request, f"no answer within {request.deadline_s:g} s ({seconds:.0f} s at {url})")
        except asyncio.CancelledError:
            await asyncio.shield(self._end(api, rid))
            raise
        finally:
            self._open[url] -= 1

    async def _end(self, api: HttpApi, rid: str) -> None:
        """Let the server drop a request whose answer is not needed."""
        try:
            await self._dialect.abort(api, [rid])
        except EngineError:
            return  # the server is gone, and the request with it

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests on every server. Ignores servers that are gone."""
        prefixes: Sequence[str] | Literal["all"] = "all"
        if request_ids != "all":
            prefixes = [f"{id_}~" for id_ in request_ids]
        apis = [self._api(url) for url in self._endpoints.read().servers]
        await asyncio.gather(*(self._dialect.abort(api, prefixes) for api in apis), return_exceptions=True)

    def _api(self, url: str) -> HttpApi:
        if url not in self.apis:
            self.apis[url] = HttpApi(url, self._key)
        return self.apis[url]
