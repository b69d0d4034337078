"""What every API comes to: a request for one turn of a conversation, and the reply to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from plasmid.types import Message

Finish = Literal["stop", "length", "tool_calls"]


class Problem(StrEnum):
    """Why a request is refused. Each API has a status and a name of its own for it."""

    BAD_REQUEST = "bad request"
    TOO_LONG = "too long"
    UNKNOWN_SESSION = "unknown session"
    NOT_FOUND = "not found"
    NO_BUDGET = "no budget"
    ENGINE = "engine"


class Refused(Exception):
    """A request that gets an error in place of a turn. The text is for whoever wrote the agent."""

    def __init__(self, problem: Problem, text: str) -> None:
        super().__init__(problem, text)
        self.problem, self.text = problem, text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a tool that the policy asks for."""

    id: str
    name: str
    arguments: str
    """JSON, as the policy wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One turn that an agent asks for."""

    messages: tuple[Message, ...] = ()
    """The conversation so far, as chat templates read it."""
    text: str | None = None
    """The text to continue, in place of messages."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the form of OpenAI, which chat templates read."""
    max_tokens: int | None = None
    """Longest reply in tokens; None for what the run allows."""
    stop: tuple[str, ...] = ()
    """Texts that end the reply and are left out of it."""
    one_call: bool = False
    """Give back at most one tool call."""
    stream: bool = False
    stream_usage: bool = False
    """Tell the number of tokens at the end of the stream, too."""
    model: str = "policy"
    """The name that the agent gave; the reply repeats it."""
    unfollowed: tuple[str, ...] = ()
    """What the request asks for and does not get: ``temperature = 0.2 (the run samples at 1)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy wrote in one turn, as the agent sees it."""

    id: str
    text: str
    reasoning: str = ""
    """What the policy thought before, where the recipe keeps it apart."""
    calls: tuple[Call, ...] = ()
    finish: Finish
    stopped_by: str | None = None
    """Which of the request's stop texts ended it."""
    prompt_tokens: int
    completion_tokens: int


def assistant_message(text: str, calls: Sequence[Call]) -> Message:
    """A turn of the policy as chat templates read it."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        functions = [{"name": call.name, "arguments": _parsed(call.arguments)} for call in calls]
        pairs = zip(calls, functions, strict=True)
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": f} for call, f in pairs]
    return message


def with_tool_names(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages, with the tool's name in every tool result: some chat templates need it, and no API sends it."""
    names: dict[str, str] = {}
    result: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        name = names.get(message.get("tool_call_id", ""))
        result.append({**message, "name": name} if message["role"] == "tool" and name else message)
    return tuple(result)


def fingerprint(message: Message) -> str:
    """Equal for messages that mean the same.

    Clients send replies back with other spacing around the text and with arguments that they parsed and wrote anew.
    What was drawn is known by its tokens, so neither matters.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    what = {
        "role": message["role"],
        "content": message.get("content", "").strip() if message["role"] == "assistant" else message.get("content"),
        "calls": [[call["name"], call["arguments"]] for call in calls],
        "answers": message.get("tool_call_id"),
    }
    return json.dumps(what, sort_keys=True)


def _parsed(arguments: str) -> Any:
    """Arguments as the object that templates write out; text that is no JSON stays text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
