"""Registers the engine and the teacher for external servers, and OpenAI's API."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from .remote.apis import CompletionsApi
from .remote.settings import Server, ServerTeacher


@hookimpl
def register_components() -> list[type[Component]]:
    return [Server, ServerTeacher, CompletionsApi]
