"""`Dialect`: everything that differs between server programs. Supervision, routing and weight syncs use it alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from plasmid.protocols import PauseMode
from plasmid.types import Completion, GenerateRequest

from .api import HttpApi


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a running server says of itself; releases of a program differ."""

    release: str
    context_length: int
    ranks: int
    """Processes that hold parts of the model."""
    features: frozenset[str] = frozenset()
    """Calls and fields that this release has, in names of the dialect's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Gauges of one scheduler of a server."""

    running: float = 0.0
    """Requests that are being computed."""
    queued: float = 0.0
    """Requests that wait."""
    tokens: float = 0.0
    """Tokens decoded since the server started."""
    seconds: float = 0.0
    """Time spent on them."""
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Metrics that are averaged over schedulers, by name: ``kv_usage``, ``cache_hit_rate``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What is chosen anew for each start of a server, on each of its machines."""

    host: str
    port: int
    name: str = ""
    """Random name of the model to serve, by which the server is recognised; empty on other machines than the first."""
    nodes: int = 1
    """Machines of the server."""
    node_rank: int = 0
    rendezvous: str = ""
    """Host and port where processes on several machines meet."""


class Program(NamedTuple):
    """A Python function to run in a process of its own, as ``module:function``, and its arguments."""

    function: str
    """It is called with one dict: the arguments and the random ``api_key`` that requests must carry."""
    arguments: Mapping[str, Any]


class HttpRequest(NamedTuple):
    """A POST to a server."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Dialect(Protocol):
    """How one server program is launched, paused, updated and asked.

    Picklable: the engine, the actors beside servers and the rollout workers each have a copy. Methods that call a
    server raise `EngineError`. The caller limits their time (`HttpApi.limited`).
    """

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of servers."""
        ...

    def launch(self, start: StartOptions) -> Program:
        """Return the program of a server. Its processes call `loading.execute` for each `update`."""
        ...

    def launch_router(self, host: str, port: int, metrics_port: int) -> Program:
        """Return the program of a router without servers; `Router` adds and removes them through ``/workers``."""
        ...

    async def served_name(self, api: HttpApi) -> str:
        """Return `StartOptions.name` of the server that answers. Raises `EngineError` until it is ready."""
        ...

    async def describe(self, api: HttpApi) -> ServerInfo:
        """Read what the server says of itself."""
        ...

    async def check_attached(self, api: HttpApi, info: ServerInfo) -> None:
        """Raise `EngineError` if a server that others run serves another model or cannot be updated by us."""
        ...

    async def loads(self, api: HttpApi) -> tuple[Load, ...]:
        """Gauges of each scheduler. Must be answered by the processes that compute: health checks use it."""
        ...

    async def pause(self, api: HttpApi, mode: PauseMode) -> None:
        """Stop drawing tokens; running requests are held with ``in_place``, else end with the tokens so far."""
        ...

    async def resume(self, api: HttpApi) -> None:
        """Undo `pause`."""
        ...

    async def set_memory(self, api: HttpApi, parts: AbstractSet[str], *, is_held: bool) -> None:
        """Take GPU memory for ``weights`` and ``kv_cache``, or one of them, or free it."""
        ...

    async def begin_update(self, api: HttpApi, info: ServerInfo) -> None:
        """Open a weight update, where the release needs that. Must also work after an update that was abandoned."""
        ...

    async def end_update(self, api: HttpApi, info: ServerInfo) -> None:
        """Close the weight update."""
        ...

    async def update(
        self, api: HttpApi, info: ServerInfo, message: bytes, *, version: int | None, flush_cache: bool
    ) -> None:
        """Have every process call `loading.execute` with the message. Later tokens are of ``version``, if given."""
        ...

    async def load_folder(self, api: HttpApi, folder: Path, *, version: int, flush_cache: bool) -> None:
        """Have a server that others run load safetensors files as ``version``."""
        ...

    def request(self, request: GenerateRequest, *, rid: str, max_new_tokens: int) -> HttpRequest:
        """Return the HTTP request for a completion, under the id ``rid``."""
        ...

    def completion(self, request: GenerateRequest, status: int, answer: Any) -> Completion:
        """Return the completion in an answer. A refusal is a completion with an error."""
        ...

    async def abort(self, api: HttpApi, prefixes: Sequence[str] | Literal["all"]) -> None:
        """End the requests whose ids begin with one of the prefixes, or all."""
        ...
