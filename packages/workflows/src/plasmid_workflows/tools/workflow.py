"""Turns with tools: the policy calls, reads what came of it, and goes on until it answers without a call."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from plasmid.components import Rollout
from plasmid.components.interaction import Tool
from plasmid.errors import ConfigError, DataError, IsolationError
from plasmid.protocols import RunContext
from plasmid.settings.trust import ACTIVE
from plasmid.types import Message, Prompt, Sample
from plasmid_sandbox import Limits
from pydantic import Field, PrivateAttr, SerializeAsAny, field_validator

from ..conversation import Conversation, ConversationState
from ..transcript import Transcript
from . import signatures
from .tool_calls import EXAMPLES, PARSERS
from .toolset import Result, Toolset

Format = Literal["hermes", "llama3", "mistral", "python", "qwen-xml"]


class Tools(Conversation):
    """Turns with tools, until the policy answers without a call.

    The sample's text is that last answer; ``metadata`` counts ``turns``, ``calls`` and ``failed_calls`` and has the
    ``messages``. Calls that cannot be read, fail, hang or crash are told to the policy as text.
    """

    kind: Literal["tools"] = "tools"
    tools: tuple[SerializeAsAny[Tool], ...] = Field(min_length=1)
    """What the policy may call."""
    format: Format = "hermes"
    """How the model writes calls."""
    shown: Literal["template", "system"] = "template"
    """Where the policy reads about the tools: where the chat template puts them, or in the system message."""
    result_role: Literal["tool", "user"] = "tool"
    """Whose messages results are; ``user`` for chat templates that know no tools."""
    max_result_chars: int = Field(4000, ge=1)
    """Characters of one result that the policy gets to read."""
    call_timeout_s: float = Field(10.0, gt=0)
    """Longest time for one call."""
    memory_mb: int = Field(1024, ge=16)
    """Memory that one call may take, in MiB."""
    network: Annotated[bool, ACTIVE] = False
    """Let calls reach the network."""
    processes: bool = False
    """Let calls start processes; they are killed when the call ends."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that calls get. They have paths, the locale and the settings of Python and of the
    Hugging Face caches anyway, and no other: no keys."""
    workers: Literal["auto"] | int = "auto"
    """Processes that make calls; ``auto`` is one for each core, at most 8."""
    _toolset: Toolset | None = PrivateAttr(None)

    @field_validator("tools")
    @classmethod
    def _tools_can_be_called(cls, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        names = [signatures.schema(tool.implementation())["function"]["name"] for tool in tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} tools are named {name!r}; a policy could not tell them apart")
        return tools

    @field_validator("workers")
    @classmethod
    def _workers_are_some(cls, workers: Literal["auto"] | int) -> Literal["auto"] | int:
        if isinstance(workers, int) and workers < 1:
            raise ValueError(f"must be 'auto' or at least 1, got {workers}")
        return workers

    async def open(self, context: RunContext) -> None:
        workers = min(os.cpu_count() or 1, 8) if self.workers == "auto" else self.workers
        limits = Limits(
            timeout_s=self.call_timeout_s,
            memory_mb=self.memory_mb,
            network=self.network,
            processes=self.processes,
            environment=self.environment,
        )
        self._toolset = Toolset(self.tools, limits, workers=workers, max_chars=self.max_result_chars)
        try:
            await self._toolset.start()
        except IsolationError as error:
            raise ConfigError(f"workflow.tools: {error}") from None

    async def close(self) -> None:
        if self._toolset is not None:
            self._toolset.close()
            self._toolset = None

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        if self._toolset is None:
            raise ValueError("open the workflow first")
        transcript = self._transcript(rollout, prompt, self._toolset.schemas())
        state = self.begin(rollout, transcript)
        calls = failed = 0
        answer = ""
        while (text := await state.next_turn()) is not None:
            answer = text
            parsed = PARSERS[self.format](transcript.turn_text(keep_special=True))
            if state.was_cut:
                state.cut_by = "max_new_tokens"
            if state.was_cut or not parsed.calls or state.is_over():
                break
            results = await asyncio.gather(*(self._toolset.call(call) for call in parsed.calls))
            state.add_messages(self._result_messages([call.name for call in parsed.calls], results, calls))
            calls, failed = calls + len(results), failed + sum(result.is_error for result in results)
        return [state.sample(prompt, answer, calls=calls, failed_calls=failed)]

    def _transcript(self, rollout: Rollout, prompt: Prompt, schemas: list[dict[str, Any]]) -> Transcript:
        if not prompt.messages:
            raise DataError(f'prompt {prompt.id} is plain text, and tools need a chat; set data.prompt_as = "chat"')
        if self.shown == "template":
            template = {**prompt.template, "tools": schemas}
            return Transcript.of_messages(rollout, prompt.messages, template=template, keep_past=self.keep_past)
        messages = with_system(prompt.messages, description(schemas, self.format))
        return Transcript.of_messages(rollout, messages, template=prompt.template, keep_past=self.keep_past)

    def _result_messages(self, names: Sequence[str], results: Sequence[Result], calls: int) -> list[Message]:
        if self.result_role == "user":
            return [{"role": "user", "content": "\n".join(result.text for result in results)}]
        return [
            {"role": "tool", "name": name, "tool_call_id": f"call{calls + i:05d}", "content": result.text}
            for i, (name, result) in enumerate(zip(names, results, strict=True))
        ]


def description(schemas: Sequence[dict[str, Any]], format: Format) -> str:
    """What a system message says about tools."""
    lines = [json.dumps(schema["function"]) for schema in schemas]
    return "\n".join(["You may call these tools:", *lines, "To call one, write:", EXAMPLES[format]])


def with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with the text at the end of the system message, which is made if there is none."""
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content', '')}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


__all__ = ["ConversationState", "Tools", "description", "with_system"]
