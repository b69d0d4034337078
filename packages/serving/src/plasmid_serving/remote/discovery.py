"""Detect the API of an external server, and the name of its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plasmid.errors import EngineError
from plasmid.plugins.registry import find_components, load_plugins

from .apis import CompletionsApi, ServerApi
from .client import ServerConnection, authorization
from .settings import ServerAccess

ANSWER_S = 30.0
"""Time limit for requests about the server itself, in seconds."""
MAX_NAME = 500
"""Maximum length of a model name, in characters."""


async def find_server(settings: ServerAccess, plugins: Sequence[str]) -> tuple[ServerApi, str]:
    """Return the server's API and the model's name in requests. Raises `EngineError` if it cannot be reached."""
    authorization(settings)
    server = ServerConnection(settings)
    try:
        api = await _find_api(settings, server, plugins) if settings.api == "auto" else settings.api
        served = settings.model
        if api.names_model and served == "auto":
            listed = await get(settings, server, "/v1/models")
            try:
                served = str(listed["data"][0]["id"])[:MAX_NAME]
            except (KeyError, IndexError, TypeError):
                table = settings.table
                raise EngineError(f"{table}.url: {server.shown} lists no model; set {table}.model") from None
    finally:
        await server.close()
    return api, served


async def _find_api(settings: ServerAccess, server: ServerConnection, plugins: Sequence[str]) -> ServerApi:
    """Return the installed API whose own path the server answers, or else OpenAI's."""
    for cls in find_components(load_plugins(files=map(Path, plugins), again=False))["server_apis"].values():
        if issubclass(cls, ServerApi) and cls.probe and await get(settings, server, cls.probe, needed=False):
            return cls()
    return CompletionsApi()


async def get(settings: ServerAccess, server: ServerConnection, path: str, *, needed: bool = True) -> Any:
    """Return the JSON at the path; None if it is missing and not ``needed``. Raises `EngineError`."""
    answer = await server.send("GET", path, limit_s=ANSWER_S)
    if answer.error and not answer.status:
        raise EngineError(f"{settings.table}.url: cannot reach {server.shown}: {answer.error}")
    if answer.error and needed:
        raise EngineError(
            f"{settings.table}.url: {server.shown}{path} returned status {answer.status}, so it is not an "
            f"OpenAI-compatible server; check the URL, and set {settings.table}.api_key_env if it requires a key"
        )
    return answer.value
