"""The HTTP server for agents: one for all sessions of a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Iterator
from typing import Any, Protocol

from aiohttp import http_exceptions, web
from plasmid.errors import one_line
from plasmid.types import SamplingParams

from .chat import ChatRequest, Problem, Reply, RequestError
from .connections import IDLE_S, MAX_CONNECTIONS, Connections, Handler
from .session import PreparedRequest, Session
from .wire import anthropic_messages, openai_chat, openai_text

MAX_BODY = 16 << 20
"""Maximum size of a request body in bytes, after decompression: a million tokens, still quick to parse."""
BODY_S = 60.0
"""Time limit for receiving the body of a request, in seconds."""
KEEP_ALIVE_S = 5.0
"""Interval of keep-alive events in a stream, in seconds. Without them, proxies would close idle connections, and
disconnected clients would go unnoticed."""
ENDPOINTS = "/v1/chat/completions, /v1/completions, /v1/models, /v1/messages and /v1/messages/count_tokens"
log = logging.getLogger(__name__)


class _HttpErrorFilter(logging.Filter):
    """Drops log records of invalid HTTP requests: they get status 400, and their tracebacks could fill the log."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, http_exceptions.HttpProcessingError)


http_log = logging.getLogger(f"{__name__}.http")
http_log.addFilter(_HttpErrorFilter())


class Wire(Protocol):
    """Request and response format of one API. Implemented by the modules in `wire`."""

    def parse(self, data: object, sampling: SamplingParams) -> ChatRequest:
        """Parse the body of a request. Raises `RequestError`."""

    def answer(self, request: ChatRequest, reply: Reply) -> dict[str, Any]:
        """Return the body of a complete response."""

    def events(self, request: ChatRequest, reply: Reply) -> Iterator[bytes]:
        """Yield the server-sent events of a streaming response."""

    def refusal(self, error: RequestError) -> tuple[int, dict[str, Any]]:
        """Return status and body of an error response."""

    def refusal_event(self, error: RequestError) -> bytes:
        """Return the event that ends a stream with an error."""


class AgentServer:
    """Serves OpenAI's and Anthropic's APIs. A request selects its session by the base URL or by its API key."""

    def __init__(
        self,
        *,
        host: str,
        advertised: str,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_connections: int = MAX_CONNECTIONS,
        idle_s: float = IDLE_S,
    ) -> None:
        self._host, self._advertised, self._keep_alive_s = host, advertised, keep_alive_s
        self._connections = Connections(max_connections=max_connections, idle_s=idle_s)
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port. Raises `OSError` if that fails on the host."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._connections.track_request])
        for prefix in ("", "/{session}"):
            app.router.add_post(f"{prefix}/v1/chat/completions", self._turn_handler(openai_chat))
            app.router.add_post(f"{prefix}/v1/completions", self._turn_handler(openai_text))
            app.router.add_post(f"{prefix}/v1/messages", self._turn_handler(anthropic_messages))
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{name}}", self._model)
        app.router.add_route("*", "/{path:.*}", _not_found)
        # handlers end with their clients: abandoned turns must be neither generated nor trained on
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, logger=http_log, shutdown_timeout=1.0
        )
        await self._runner.setup()
        assert self._runner.server is not None, "created by setup"
        self._port = self._connections.listen(self._host, self._runner.server)

    async def close(self) -> None:
        """Stop listening, and cancel running requests."""
        await self._connections.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @contextlib.contextmanager
    def serve_session(self, session: Session) -> Iterator[tuple[str, str]]:
        """Serve a session. Yields its URL, to which APIs append ``/v1``, and its API key."""
        key = secrets.token_hex(16)
        self._sessions[key] = session
        try:
            yield f"http://{self._advertised}:{self._port}/{key}", key
        finally:
            del self._sessions[key]

    def _session(self, request: web.Request) -> Session:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = request.match_info.get("session") or request.headers.get("x-api-key") or bearer
        if key not in self._sessions:
            raise RequestError(
                Problem.UNKNOWN_SESSION,
                "unknown base URL or API key, or the rollout has ended; use those that the agent was started with",
            )
        return self._sessions[key]

    def _turn_handler(self, wire: Wire) -> Handler:
        """Create the handler of turn requests in one format."""

        async def handle(request: web.Request) -> web.StreamResponse:
            session = None
            try:
                session = self._session(request)
                prepared = session.prepare(wire.parse(await _json(request), session.sampling))
                if prepared.request.stream:
                    return await self._stream(request, wire, session, prepared)
                return web.json_response(wire.answer(prepared.request, await session.generate(prepared)))
            except RequestError as error:
                return _refuse(wire, error)
            except (ConnectionError, web.HTTPException):
                raise
            except RecursionError:
                return _refuse(wire, _nesting_error())
            except Exception as error:  # boundary: the agent gets a response, and the rollout an error
                log.exception("a request failed")
                if session is not None:
                    session.error = one_line(error)
                return _refuse(wire, RequestError(Problem.ENGINE, one_line(error)))

        return handle

    async def _stream(
        self, request: web.Request, wire: Wire, session: Session, prepared: PreparedRequest
    ) -> web.StreamResponse:
        """Send the turn in pieces once it is complete, because only its end shows whether it calls tools."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        turn = asyncio.ensure_future(session.generate(prepared))
        try:
            while not (await asyncio.wait([turn], timeout=self._keep_alive_s))[0]:
                await response.write(b": waiting for the policy\n\n")
            for event in _stream_events(wire, session, prepared, turn):
                await response.write(event)
            await response.write_eof()
        finally:
            turn.cancel()
            await asyncio.wait([turn])
        return response

    async def _count(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            asked = anthropic_messages.parse_count(await _json(request), session.sampling)
            return web.json_response({"input_tokens": session.count(asked)})
        except RequestError as error:
            return _refuse(anthropic_messages, error)
        except RecursionError:
            return _refuse(anthropic_messages, _nesting_error())

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [_card("policy")], "has_more": False})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_card(request.match_info["name"]))


def _stream_events(
    wire: Wire, session: Session, prepared: PreparedRequest, turn: asyncio.Future[Reply]
) -> Iterator[bytes]:
    try:
        yield from wire.events(prepared.request, turn.result())
    except RequestError as error:
        yield wire.refusal_event(error)
    except Exception as error:  # boundary: as for requests without a stream
        log.exception("a request failed")
        session.error = one_line(error)
        yield wire.refusal_event(RequestError(Problem.ENGINE, one_line(error)))


async def _not_found(request: web.Request) -> web.StreamResponse:
    wire = anthropic_messages if "anthropic-version" in request.headers else openai_chat
    path = request.path.rpartition("/v1")[2]
    return _refuse(wire, RequestError(Problem.NOT_FOUND, f"{path}: not found; the endpoints are {ENDPOINTS}"))


async def _json(request: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_S):
            body = await request.read()
    except TimeoutError:
        raise RequestError(Problem.BAD_REQUEST, f"the body took longer than {BODY_S:g} s to arrive") from None
    try:
        data = json.loads(body.decode("utf-8"))
        if b"\\ud" in body.lower():
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(Problem.BAD_REQUEST, "the body contains an unpaired surrogate") from None
    except ValueError as error:  # invalid encoding or syntax, or a number with thousands of digits
        raise RequestError(Problem.BAD_REQUEST, f"the body is not valid JSON: {error}") from None
    return data


def _nesting_error() -> RequestError:
    return RequestError(Problem.BAD_REQUEST, "the body is nested too deeply")


def _refuse(wire: Wire, error: RequestError) -> web.Response:
    status, body = wire.refusal(error)
    # prevents clients from retrying errors that a retry cannot fix
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})


def _card(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "plasmid", "display_name": name}
