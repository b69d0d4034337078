"""`Dialect`: everything that differs between server programs. Supervision, routing and weight syncs use only this."""

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
    """Properties reported by a running server; they differ between releases."""

    release: str
    context_length: int
    ranks: int
    """Number of processes that hold parts of the model."""
    features: frozenset[str] = frozenset()
    """Calls and fields that this release supports, by names that the dialect defines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Gauges of one scheduler of a server."""

    running: float = 0.0
    """Number of running requests."""
    queued: float = 0.0
    """Number of queued requests."""
    tokens: float = 0.0
    """Tokens decoded since the server started."""
    seconds: float = 0.0
    """Decoding time of these tokens, in seconds."""
    fractions: Mapping[str, float] = field(default_factory=dict)
    """Metrics to average over schedulers, by name: ``kv_usage``, ``cache_hit_rate``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Options that change with every start of a server, on each of its machines."""

    host: str
    port: int
    name: str = ""
    """Random name of the served model, which identifies the server; empty on all machines but the first."""
    nodes: int = 1
    """Number of machines of the server."""
    node_rank: int = 0
    rendezvous: str = ""
    """Host and port at which processes on several machines meet."""


class Program(NamedTuple):
    """A Python function to run in a separate process, as ``module:function``, and its arguments."""

    function: str
    """Called with one dict: the arguments, and the random ``api_key`` that requests must carry."""
    arguments: Mapping[str, Any]
    python: str = ""
    """Python interpreter of the process; empty for the current one."""


class HttpRequest(NamedTuple):
    """A POST to a server."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class Dialect(Protocol):
    """How to launch, pause, update and query one server program.

    Picklable: the engine, the server actors and the rollout workers each have a copy. Methods that call a server raise
    `EngineError`. The caller limits their duration (`HttpApi.with_time_limit`).
    """

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment variables of servers."""

    def launch(self, start: StartOptions) -> Program:
        """Return the program of a server. Its processes call `loading.execute` for each `update`."""

    async def served_name(self, api: HttpApi) -> str:
        """Return `StartOptions.name` of the responding server. Raises `EngineError` until it is ready."""

    async def describe(self, api: HttpApi) -> ServerInfo:
        """Read the properties that the server reports."""

    async def check_attached(self, api: HttpApi, info: ServerInfo) -> None:
        """Raise `EngineError` if an external server serves another model or cannot be updated."""

    async def loads(self, api: HttpApi) -> tuple[Load, ...]:
        """Return the load of each scheduler. The compute processes must answer, because health checks use this call."""

    async def pause(self, api: HttpApi, mode: PauseMode) -> None:
        """Stop generating. With ``in_place`` running requests are paused; otherwise they end with the tokens generated
        so far, and clients send no new ones during this call. Afterwards the server queues requests until `resume`."""

    async def resume(self, api: HttpApi) -> None:
        """Undo `pause`."""

    async def set_memory(self, api: HttpApi, parts: AbstractSet[str], *, is_held: bool) -> None:
        """Allocate or release GPU memory of ``weights``, ``kv_cache`` or both."""

    async def begin_update(self, api: HttpApi, info: ServerInfo) -> None:
        """Begin a weight update, where the release requires it. Must also work after an abandoned update."""

    async def end_update(self, api: HttpApi, info: ServerInfo) -> None:
        """End the weight update."""

    async def update(
        self, api: HttpApi, info: ServerInfo, message: bytes, *, version: int | None, flush_cache: bool
    ) -> None:
        """Have every process call `loading.execute` with the message. If given, ``version`` applies to later tokens."""

    async def load_folder(self, api: HttpApi, folder: Path, *, version: int, flush_cache: bool) -> None:
        """Have an external server load safetensors files as ``version``."""

    def request(self, request: GenerateRequest, *, rid: str, max_new_tokens: int) -> HttpRequest:
        """Return the HTTP request for a completion, with the id ``rid``."""

    def completion(self, request: GenerateRequest, status: int, answer: Any) -> Completion:
        """Convert a response to a completion. A refusal becomes a completion with an error."""

    async def abort(self, api: HttpApi, prefixes: Sequence[str] | Literal["all"]) -> None:
        """Abort the requests whose ids start with one of the prefixes, or all."""


class RouterDialect(Protocol):
    """Additional methods of a dialect whose program comes with a router."""

    def launch_router(self, host: str, port: int, metrics_port: int) -> Program:
        """Return the program of a router without servers; `Router` adds and removes them through ``/workers``."""
