"""The control calls of one SGLang server over HTTP, and what its release knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
from plasmid.errors import EngineError, one_line
from plasmid.urls import shown_url

from .gauges import Load, flat

CONTROL_S = 120.0
"""Longest time for a control call that moves no weights."""


MAX_BYTES = 64 << 20
"""Largest answer of a control call."""


async def read_answer(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body. Raises `EngineError` if it has more than ``max_bytes``."""
    data = bytearray()
    async for chunk in reply.content.iter_any():
        data += chunk
        if len(data) > max_bytes:
            raise EngineError(f"{shown_url(str(reply.url))}: the answer has more than {max_bytes} bytes")
    return bytes(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one server knows, read from its own description; releases differ."""

    release: str
    model_path: str
    context_length: int
    ranks: int
    """Processes that hold parts of the model."""
    has_sessions: bool
    """Weight updates stand between begin_weight_update and end_weight_update (0.5.23)."""
    has_selector: bool
    """Updates name the models that they are for; before that, a flag left out the draft model."""
    has_disk_updates: bool
    """Weights can be taken from a folder."""


class Api:
    """Calls to one server. Connections belong to the event loop that makes the first call."""

    def __init__(self, url: str, key: str = "") -> None:
        """``key`` is the server's API key, if it wants one."""
        self.url, self.key = url.rstrip("/"), key
        self._session: aiohttp.ClientSession | None = None

    def session(self) -> aiohttp.ClientSession:
        """Connections to the server, without a limit on their number or their time."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            # a server closes connections that were idle for 5 s, and what is just being sent on one then is lost
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, headers=headers
            )
        return self._session

    async def get(self, path: str, *, timeout_s: float = CONTROL_S) -> Any:
        """The JSON answer of one call. Raises `EngineError`."""
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = CONTROL_S) -> Any:
        """The JSON answer of one call; None for an empty one. Raises `EngineError` with what the server says."""
        return await self._call("POST", path, body or {}, timeout_s)

    async def delete(self, path: str, *, timeout_s: float = CONTROL_S) -> Any:
        """The JSON answer of one call. Raises `EngineError`."""
        return await self._call("DELETE", path, None, timeout_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            call = self.session().request(method, self.url + path, json=body, allow_redirects=False)
            async with asyncio.timeout(timeout_s), call as reply:
                data = await read_answer(reply, MAX_BYTES)
            if reply.status not in (200, 202):
                text = " ".join(data.decode(errors="replace").split())[:500]
                raise EngineError(f"{self.url}{path}: answered {reply.status}: {text}")
            return json.loads(data) if data.strip() else None
        except TimeoutError:
            raise EngineError(f"{self.url}{path}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineError(f"{self.url}{path}: {one_line(error)}") from None
        except (ValueError, RecursionError):
            raise EngineError(f"{self.url}{path}: the answer is no JSON") from None

    async def info(self, *, timeout_s: float = CONTROL_S) -> Mapping[str, Any]:
        """Everything that the server says of itself."""
        return cast(Mapping[str, Any], await self.get("/get_server_info", timeout_s=timeout_s))

    async def abilities(self) -> Abilities:
        """What the server knows."""
        info, about = await self.info(), await self.get("/openapi.json")
        models = await self.get("/v1/models")
        update = about["components"]["schemas"].get("UpdateWeightsFromTensorReqInput", {}).get("properties", {})
        return Abilities(
            release=str(info.get("version", "")),
            model_path=str(info.get("model_path", "")),
            context_length=int(models["data"][0]["max_model_len"]),
            ranks=int(info.get("tp_size", 1)) * int(info.get("pp_size", 1)),
            has_sessions="/begin_weight_update" in about["paths"],
            has_selector="selector" in update,
            has_disk_updates="/update_weights_from_disk" in about["paths"],
        )

    async def loads(self, *, timeout_s: float) -> tuple[Load, ...]:
        """Gauges of each of the server's schedulers, asked of the processes that compute: an answer shows they live."""
        answer = await self.get("/v1/loads", timeout_s=timeout_s)
        return tuple(flat(load) for load in answer["loads"])

    async def pause(self, mode: str, *, timeout_s: float) -> None:
        """Stop drawing tokens; ``abort``, ``retract`` or ``in_place`` say what happens to running requests."""
        await self.post("/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    async def resume(self) -> None:
        """Undo `pause`."""
        await self.post("/continue_generation")

    async def abort(self, prefixes: Sequence[str]) -> None:
        """End the requests whose ids begin so."""
        await asyncio.gather(*(self.post("/abort_request", {"rid": prefix}) for prefix in prefixes))

    async def abort_all(self) -> None:
        """End every request."""
        await self.post("/abort_request", {"abort_all": True})

    async def close(self) -> None:
        """Give the connections back."""
        if self._session is not None:
            await self._session.close()
            self._session = None
