"""API-independent form of a request for one conversation turn, and of the reply."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from plasmid.types import Message

Finish = Literal["stop", "length", "tool_calls"]


class Problem(StrEnum):
    """Reason why a request is refused. Each API maps it to a status and a name."""

    BAD_REQUEST = "bad request"
    TOO_LONG = "too long"
    UNKNOWN_SESSION = "unknown session"
    NOT_FOUND = "not found"
    NO_BUDGET = "no budget"
    ENGINE = "engine"


class RequestError(Exception):
    """Raised for requests that are refused. The message is for the author of the agent."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(problem, text)
        self.problem, self.text = problem, text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tool call by the policy."""

    id: str
    name: str
    arguments: str
    """JSON, as the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One turn that an agent requests."""

    messages: tuple[Message, ...] = ()
    """The conversation so far, in the form of chat templates."""
    text: str | None = None
    """The text to continue, instead of messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in OpenAI's format, which chat templates use."""
    max_tokens: int | None = None
    """Maximum length of the reply, in tokens; None for the run's limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply and are removed from it."""
    one_call: bool = False
    """Return at most one tool call."""
    stream: bool = False
    stream_usage: bool = False
    """Report the number of tokens at the end of the stream, too."""
    model: str = "policy"
    """The model name in the request; the reply repeats it."""
    unsupported: tuple[str, ...] = ()
    """Options of the request that the run does not support: ``temperature = 0.2 (the run samples at 1)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One turn of the policy, in the form that the agent receives."""

    id: str
    text: str
    reasoning: str = ""
    """Reasoning before the text, if the recipe separates it."""
    calls: tuple[Call, ...] = ()
    finish: Finish
    stopped_by: str | None = None
    """Which stop text of the request ended the reply."""
    prompt_tokens: int
    completion_tokens: int


def assistant_message(text: str, calls: Sequence[Call]) -> Message:
    """Return a turn of the policy in the form of chat templates."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": call.name, "arguments": _parse_arguments(call.arguments)} for call in calls]
        pairs = zip(calls, functions, strict=True)
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": f} for call, f in pairs]
    return message


def add_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Add the tool's name to every tool result: some chat templates need it, and no API sends it."""
    names: dict[str, str] = {}
    result: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        result.append({**message, "name": name} if message["role"] == "tool" and name else message)
    return tuple(result)


def fingerprint(message: Message) -> str:
    """Return a string that is equal for equivalent messages.

    Clients send replies back with different spacing around the text and with arguments that they parsed and serialized
    again. Neither matters, because the sampled tokens are stored.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    what = {
        "role": message["role"],
        "content": message.get("content", "").strip() if message["role"] == "assistant" else message.get("content"),
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "answers": message.get("tool_call_id"),
    }
    return json.dumps(what, sort_keys=True)


def _parse_arguments(arguments: str) -> Any:
    """Parse the arguments of a tool call for the chat template. Text that is not JSON is returned unchanged."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
