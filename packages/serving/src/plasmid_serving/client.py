"""Client of rollout workers: token ids in, token ids and log-probabilities out, over HTTP."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson
from plasmid.errors import EngineError, one_line
from plasmid.types import Completion, GenerateRequest, StopReason
from plasmid.utils.safe_files import write_text

from .api import HttpApi, ServerAddress, read_answer
from .completions import empty_completion, failed_completion
from .dialect import Dialect

POLL_S = 0.05
"""Interval for checking whether a server is available, in seconds."""
RETRIED = (502, 503)
"""Status codes of a server that is starting, or of a router that lost its server. A retry may succeed."""
SERVER_LOST = b"error sending request"
"""Text of a router's response, with status 500, if a server has just ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Engine state that rollout workers need."""

    urls: tuple[ServerAddress, ...] = ()
    """Servers that serve the current policy, or the router in front of them."""
    servers: tuple[ServerAddress, ...] = ()
    """All servers that may hold requests, for aborts."""
    is_open: bool = True
    """False while new requests must not be sent."""
    context_length: int = 0
    """Maximum length of a sample, in tokens."""
    error: str = ""
    """Why the engine can no longer serve."""

    @property
    def accept_requests(self) -> bool:
        """Return whether there is a server to which requests may be sent."""
        return self.is_open and bool(self.urls)


class EndpointsFile:
    """File through which the engine publishes its endpoints. Picklable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._last = Endpoints(is_open=False)

    def write(self, endpoints: Endpoints) -> None:
        """Replace the file atomically."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path, json.dumps(asdict(endpoints)))

    def read(self) -> Endpoints:
        """Return the latest state. The file is read only if its modification time has changed."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return self._last
        if (seen := (stat.st_mtime_ns, stat.st_ino)) != self._seen:
            found = json.loads(self._path.read_text())
            listed = {name: tuple(ServerAddress(**one) for one in found[name]) for name in ("urls", "servers")}
            self._last = Endpoints(**{**found, **listed})
            self._seen = seen
        return self._last


def _full_completion(request: GenerateRequest) -> Completion:
    if request.num_generated:
        return empty_completion(request, StopReason.LENGTH)
    tokens = len(request.token_ids)
    return failed_completion(
        request, f"the prompt has {tokens} tokens, which leaves no room for a completion; raise model.max_length"
    )


def _max_bytes(request: GenerateRequest, num_tokens: int) -> int:
    """Return the maximum response size for this many tokens.

    With kept sets, each token has a list of token ids; with experts, each token of the prompt, too, has its experts.
    """
    routing = request.routing
    experts = 0 if routing is None else 8 * routing.layers * routing.choices * (len(request.token_ids) + num_tokens)
    return (1 << 20) + num_tokens * (1 << 16 if request.wants_kept_set else 1 << 10) + experts


class _UnavailableError(Exception):
    """The server refused or dropped the request. Another server may accept it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """Options for finding and calling servers."""

    endpoints: EndpointsFile
    dialect: Dialect
    max_requests: int
    """Maximum number of open requests on each event loop."""
    secret: str = field(default="", repr=False)
    """See `ServerAddress.open`."""


class ServersClient:
    """Implements `EngineClient`. Picklable; threads of one process may share it."""

    def __init__(self, options: ClientOptions) -> None:
        self._options = options
        self._loops: dict[asyncio.AbstractEventLoop, _LoopClient] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ServersClient, (self._options,)

    def _loop_client(self) -> _LoopClient:
        """Return the state of the running event loop, which owns its connections."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _LoopClient(self._options)
        return self._loops[loop]

    async def generate(self, request: GenerateRequest) -> Completion:
        """Generate a continuation of the request's tokens."""
        return await self._loop_client().generate(request)

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests early. Returns once the servers have been notified."""
        await self._loop_client().abort(request_ids)

    async def fetch_partial(self, request_ids: Sequence[str]) -> Sequence[Completion]:
        """End requests, because servers only report partial results of ended requests, and return empty completions.

        The callers of `generate` get the partial results, and continue from them.
        """
        return await self._loop_client().end_sent(request_ids)

    async def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Forget the order in which the sessions began; servers keep no session state."""
        self._loop_client().slots.end_sessions(session_ids)

    async def disconnect(self) -> None:
        """Close the connections of this event loop. Later calls of `generate` on it raise `EngineError`."""
        await self._loop_client().close()


class RequestSlots:
    """Slots for open requests. Free slots go to the oldest sessions, as soon as servers accept requests.

    A pause aborts all open requests at once, and rollouts send them again. First come, first served would put them
    behind those of rollouts that have not begun, so that the oldest groups would become even older with every weight
    sync.
    """

    def __init__(self, count: int, can_proceed: Callable[[], bool]) -> None:
        """``can_proceed`` returns False while slots must not be given out."""
        self._free, self._can_proceed = count, can_proceed
        self._sessions: dict[str, int] = {}
        """Position of each session in the order of first requests."""
        self._number = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, session_id: str) -> None:
        """Wait for a slot."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = self._sessions.setdefault(session_id, next(self._number))
        heapq.heappush(self._waiting, (place, next(self._number), slot))
        self._give_out()
        try:
            await slot
        except asyncio.CancelledError:
            if not slot.cancelled():  # the slot has been given to this request
                self.release()
            raise

    def release(self) -> None:
        """Return a slot."""
        self._free += 1
        self._give_out()

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Forget sessions that send no more requests."""
        for id_ in session_ids:
            self._sessions.pop(id_, None)

    def _give_out(self) -> None:
        """Give out free slots, or try again later if servers accept no requests."""
        while self._waiting and (self._waiting[0][-1].done() or (self._free and self._can_proceed())):
            slot = heapq.heappop(self._waiting)[-1]
            if not slot.done():
                self._free -= 1
                slot.set_result(None)
        if self._waiting and self._free and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(POLL_S, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        self._give_out()


class _LoopClient:
    """The client on one event loop."""

    def __init__(self, options: ClientOptions) -> None:
        self._endpoints, self._dialect, self._secret = options.endpoints, options.dialect, options.secret
        self.slots = RequestSlots(options.max_requests, self._can_proceed)
        self._apis: dict[ServerAddress, HttpApi] = {}
        self._is_closed = False
        self._open: Counter[ServerAddress] = Counter()
        self._attempt = itertools.count()
        self._sent: dict[str, str] = {}
        """Server-side ids of the requests that a server is processing."""

    def _can_proceed(self) -> bool:
        """Return whether a request can be sent, or must fail."""
        endpoints = self._endpoints.read()
        return endpoints.accept_requests or bool(endpoints.error)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Wait for a slot and send the request, until its deadline."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(request.deadline_s):
                await self.slots.acquire(request.session_id)
        except TimeoutError:
            return failed_completion(request, f"no answer within {request.deadline_s:g} s: no server is ready")
        try:
            return await self._send(request, started)
        finally:
            self.slots.release()

    async def _send(self, request: GenerateRequest, started: float) -> Completion:
        """Send to the server with the fewest open requests; on failure retry elsewhere, until the request's
        deadline."""
        why = "no server is ready"
        while (left := request.deadline_s - (time.monotonic() - started)) > 0:
            endpoints = self._endpoints.read()
            if endpoints.error:
                raise EngineError(f"the engine cannot serve: {endpoints.error}")
            if not endpoints.accept_requests:
                await asyncio.sleep(POLL_S)
                continue
            room = endpoints.context_length - 1 - len(request.token_ids)
            allowed = min(request.sampling.max_new_tokens - request.num_generated, room)
            if allowed <= 0:
                return _full_completion(request)
            address = min(endpoints.urls, key=lambda a: self._open[a])
            try:
                return await self._send_once(address, request, allowed, left)
            except _UnavailableError as error:
                why = str(error)
                await asyncio.sleep(POLL_S)
        return failed_completion(request, f"no answer within {request.deadline_s:g} s: {why}")

    async def _send_once(
        self, address: ServerAddress, request: GenerateRequest, allowed: int, limit_s: float
    ) -> Completion:
        # servers match ids by prefix: the separator keeps "1" from matching "10"
        rid = f"{request.id}~{os.getpid()}.{next(self._attempt)}"
        path, body, headers = self._dialect.request(request, rid=rid, max_new_tokens=allowed)
        api, url = self._api(address), address.url
        started = time.monotonic()
        self._open[address] += 1
        self._sent[request.id] = rid
        try:
            async with asyncio.timeout(limit_s):
                call = api.session().post(api.url + path, json=body, headers=headers, allow_redirects=False)
                async with call as reply:
                    if reply.status in RETRIED:
                        raise _UnavailableError(f"{url} answered {reply.status}")
                    data = await read_answer(reply, _max_bytes(request, allowed))
                    if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR and SERVER_LOST in data:
                        raise _UnavailableError(f"{url}: its server has ended")
                    answer = orjson.loads(data)
                    return self._dialect.completion(request, reply.status, answer)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise _UnavailableError(f"{url}: {one_line(error)}") from None
        except TimeoutError:
            await self._end(address, rid)
            seconds = time.monotonic() - started
            return failed_completion(request, f"no answer within {request.deadline_s:g} s ({seconds:.0f} s at {url})")
        except asyncio.CancelledError:
            await asyncio.shield(self._end(address, rid))
            raise
        finally:
            self._open[address] -= 1
            self._sent.pop(request.id, None)

    async def _end(self, address: ServerAddress, rid: str) -> None:
        """Let the server drop a request whose response is no longer needed."""
        try:
            await self._dialect.abort(self._api(address), [rid])
        except EngineError:
            return  # the server has ended, or the client is closed, and the request has ended with the connection

    async def abort(self, request_ids: Sequence[str] | Literal["all"]) -> None:
        """End requests on every server. Ignores servers that are gone."""
        if self._is_closed:
            return  # servers end the requests of closed connections
        prefixes: Sequence[str] | Literal["all"] = "all"
        if request_ids != "all":
            # some servers accept only whole ids; this client knows those of its own requests
            prefixes = [self._sent.get(id_, f"{id_}~") for id_ in request_ids]
        apis = [self._api(address) for address in self._endpoints.read().servers]
        await asyncio.gather(*(self._dialect.abort(api, prefixes) for api in apis), return_exceptions=True)

    async def end_sent(self, request_ids: Sequence[str]) -> list[Completion]:
        """End requests that servers are processing; return empty completions for the others."""
        sent = [id_ for id_ in request_ids if id_ in self._sent]
        if sent:
            await self.abort(sent)
        return [Completion.without_tokens(id_) for id_ in request_ids if id_ not in self._sent and id_ not in sent]

    async def close(self) -> None:
        """Close all connections. Later requests raise `EngineError`."""
        self._is_closed = True
        await asyncio.gather(*(api.close() for api in self._apis.values()))

    def _api(self, address: ServerAddress) -> HttpApi:
        if self._is_closed:
            raise EngineError(f"{address.url}: cannot send a request, because the client is closed")
        if address not in self._apis:
            self._apis[address] = address.open(self._secret)
        return self._apis[address]
