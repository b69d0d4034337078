"""Multi-turn workflow with tools: the policy makes calls and reads results until it answers without a call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from plasmid.components import RecipeView, Rollout
from plasmid.components.interaction import Tool, ToolServer
from plasmid.errors import ConfigError, DataError, IsolationError
from plasmid.protocols import RunContext
from plasmid.settings.trust import ACTIVE
from plasmid.types import Message, Prompt, Sample
from plasmid_sandbox import Limits
from pydantic import Field, PrivateAttr, SerializeAsAny, field_validator

from ..conversation import Conversation
from ..transcript import Transcript
from . import signatures
from .formats import Format, find_parser
from .parsing import Parser, ToolCall
from .tool_calls import EXAMPLES
from .toolset import Result, Toolset


class Tools(Conversation):
    """Turns with tools, until the policy answers without a call.

    The sample's text is that last answer; ``metadata`` counts ``turns``, ``calls`` and ``failed_calls`` and has the
    ``messages``. Calls that are invalid, fail, hang or crash return an error text to the policy. If a process or
    sandbox cannot be created, the rollout becomes a sample with an error.
    """

    kind: Literal["tools"] = "tools"
    tools: tuple[SerializeAsAny[Tool], ...] = Field(min_length=1)
    """Tools that the policy may call."""
    format: Format = "hermes"
    """Format in which the model writes calls; ``auto`` is that of the model's family."""
    shown: Literal["template", "system"] = "template"
    """Where the policy sees the tools: where the chat template puts them, or in the system message."""
    result_role: Literal["tool", "user"] = "tool"
    """Role of messages with results; use ``user`` for chat templates without tool messages."""
    max_result_chars: int = Field(4000, ge=1)
    """Maximum length of one result shown to the policy, in characters."""
    call_timeout_s: float = Field(10.0, gt=0)
    """Time limit for one call, in seconds."""
    memory_mb: int = Field(1024, ge=16)
    """Memory limit of one call, in MiB."""
    network: Annotated[bool, ACTIVE] = False
    """Allow calls to access the network."""
    processes: bool = False
    """Allow calls to start processes. They are killed when the call ends."""
    environment: tuple[str, ...] = ()
    """Names of environment variables to pass to calls. Paths, the locale and the settings of Python and of the
    Hugging Face caches are always passed; nothing else is, in particular no keys."""
    workers: Literal["auto"] | int = "auto"
    """Number of processes that run calls; ``auto`` is one per core, at most 8."""
    _toolset: Toolset | None = PrivateAttr(None)
    _parser: Parser | None = PrivateAttr(None)

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        own = [tool for tool in tools if not isinstance(tool, ToolServer)]
        names = [signatures.schema(tool.implementation())["function"]["name"] for tool in own]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{names.count(name)} tools are named {name!r}; names must be distinct")
        return tools

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, workers: Literal["auto"] | int) -> Literal["auto"] | int:
        if isinstance(workers, int) and workers < 1:
            raise ValueError(f"must be 'auto' or at least 1, got {workers}")
        return workers

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.format == "auto" and self.shown == "system":
            yield "format: must be a name with shown = 'system', which shows an example of a call; got 'auto'"

    async def open(self, context: RunContext) -> None:
        self._parser = find_parser("workflow.format", self.format, context.model_type)
        limits = Limits(
            timeout_s=self.call_timeout_s,
            memory_mb=self.memory_mb,
            network=self.network,
            processes=self.processes,
            environment=self.environment,
        )
        self._toolset = Toolset(self.tools, limits, workers=self.workers, max_chars=self.max_result_chars)
        try:
            await self._toolset.start()
        except IsolationError as error:
            raise ConfigError(f"workflow.tools: {error}") from None

    async def close(self) -> None:
        if self._toolset is not None:
            await self._toolset.close()
            self._toolset = None

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        if self._toolset is None or self._parser is None:
            raise ValueError("the workflow has not been opened")
        transcript = self._transcript(rollout, prompt, self._toolset.schemas())
        state = self.begin(rollout, transcript)
        calls = failed = 0
        answer = ""
        while (text := await state.next_turn()) is not None:
            parsed = self._parser(transcript.turn_text(keep_special=True))
            answer = text if parsed.answer is None else rollout.decode(rollout.encode(parsed.answer))
            if state.was_cut:
                state.cut_by = "max_new_tokens"
            if state.was_cut or not parsed.calls or state.is_over():
                break
            results = await asyncio.gather(*(self._toolset.call(call) for call in parsed.calls))
            state.add_messages(self._result_messages(parsed.calls, results, calls))
            calls, failed = calls + len(results), failed + sum(result.is_error for result in results)
        return [state.sample(prompt, answer, calls=calls, failed_calls=failed)]

    def _transcript(self, rollout: Rollout, prompt: Prompt, schemas: list[dict[str, Any]]) -> Transcript:
        if not prompt.messages:
            raise DataError(f'prompt {prompt.id} is plain text, but tools require a chat; set data.prompt_as = "chat"')
        if self.shown == "template":
            template = {**prompt.template, "tools": schemas}
            return Transcript.of_messages(rollout, prompt.messages, template=template, keep_past=self.keep_past)
        messages = add_to_system(prompt.messages, describe_tools(schemas, self.format))
        return Transcript.of_messages(rollout, messages, template=prompt.template, keep_past=self.keep_past)

    def _result_messages(self, made: Sequence[ToolCall], results: Sequence[Result], calls: int) -> list[Message]:
        if self.result_role == "user":
            return [{"role": "user", "content": "\n".join(result.text for result in results)}]
        return [
            {
                "role": "tool",
                "name": call.name,
                "tool_call_id": call.id or f"call{calls + i:05d}",
                "content": result.text,
            }
            for i, (call, result) in enumerate(zip(made, results, strict=True))
        ]


def describe_tools(schemas: Sequence[dict[str, Any]], format: Format) -> str:
    """Describe the tools for a system message."""
    lines = [json.dumps(schema["function"]) for schema in schemas]
    return "\n".join(["You may call these tools:", *lines, "To call one, write:", EXAMPLES[format]])


def add_to_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Append the text to the system message, which is created if missing."""
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content', '')}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
