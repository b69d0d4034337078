"""OpenAI's chat completions: requests, replies as a whole or streamed, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from plasmid.types import Message, SamplingParams
from pydantic import Field

from ..chat import Call, ChatRequest, Problem, Reply, RequestError, add_tool_names, assistant_message
from .fields import Body, Content, content_text, find_unsupported, pieces, read

NO_EFFECT = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Fields that do not affect the text."""
ERRORS: Mapping[Problem, tuple[int, str, str | None]] = {
    Problem.BAD_REQUEST: (400, "invalid_request_error", None),
    Problem.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded"),
    Problem.UNKNOWN_SESSION: (401, "invalid_request_error", "invalid_api_key"),
    Problem.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    Problem.NO_BUDGET: (429, "insufficient_quota", "insufficient_quota"),
    Problem.ENGINE: (500, "server_error", None),
}


class Function(Body):
    """The called function of a tool call."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in a turn of the assistant."""

    id: str
    function: Function


class ChatMessage(Body):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionSpec(Body):
    """Name, description and parameters of a tool."""

    name: str
    strict: bool | None = None


class Tool(Body):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: FunctionSpec


class StreamOptions(Body):
    """Additional content of a stream."""

    include_usage: bool | None = None


class CommonFields(Body):
    """Fields shared by chat and text completions."""

    model: str = "policy"
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None

    def shared(self) -> dict[str, Any]:
        """Return these fields as arguments of `ChatRequest`."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return {
            "model": self.model,
            "stop": tuple(text for text in stop if text),
            "stream": bool(self.stream),
            "stream_usage": bool(self.stream_options and self.stream_options.include_usage),
        }


class ChatBody(CommonFields):
    """A request for one turn."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None


def parse(data: object, sampling: SamplingParams) -> ChatRequest:
    """Parse a request for a turn. Raises `RequestError`."""
    body = read(ChatBody, data)
    unsupported = list(find_unsupported(body, sampling, no_effect=NO_EFFECT))
    tools: tuple[Mapping[str, Any], ...] = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ())
    if body.tool_choice == "none":
        tools = ()
    elif body.tool_choice not in (None, "auto"):
        unsupported.append(f"tool_choice = {body.tool_choice!s:.80}")
    unsupported += [f"tools.{i}.function.strict = true" for i, t in enumerate(body.tools or ()) if t.function.strict]
    if body.response_format is not None and body.response_format.get("type") != "text":
        unsupported.append(f"response_format = {body.response_format!s:.80}")
    return ChatRequest(
        **body.shared(),
        messages=add_tool_names([_message(message) for message in body.messages]),
        tools=tools,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        one_call=body.parallel_tool_calls is False,
        unsupported=tuple(unsupported),
    )


def _message(message: ChatMessage) -> Message:
    text = content_text(message.content)
    if message.role == "assistant":
        calls = [(call.id, call.function) for call in message.tool_calls or ()]
        return assistant_message(text, [Call(id=id_, name=f.name, arguments=f.arguments) for id_, f in calls])
    if message.role == "tool":
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id or ""}
    return {"role": "system" if message.role == "developer" else message.role, "content": text}


def answer(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """Return the whole reply."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text or (None if reply.calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
    return {**_head(request, reply, "chat.completion"), "choices": [choice], "usage": usage(reply)}


def events(request: ChatRequest, reply: Reply) -> Iterator[bytes]:
    """Return the same reply as a stream of events."""
    head = _head(request, reply, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": ""})
    for piece in pieces(reply.reasoning):
        yield chunk({"reasoning_content": piece})
    for piece in pieces(reply.text):
        yield chunk({"content": piece})
    for index, call in enumerate(reply.calls):
        started = _call(call)
        yield chunk({"tool_calls": [{"index": index, **started, "function": {"name": call.name, "arguments": ""}}]})
        for piece in pieces(call.arguments):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    yield chunk({}, reply.finish)
    if request.stream_usage:
        yield event({**head, "choices": [], "usage": usage(reply)})
    yield b"data: [DONE]\n\n"


def refusal(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    status, kind, code = ERRORS[error.problem]
    return status, {"error": {"message": error.text, "type": kind, "param": None, "code": code}}


def refusal_event(error: RequestError) -> bytes:
    """Return an error in the middle of a stream."""
    return event(refusal(error)[1])


def event(data: Mapping[str, Any]) -> bytes:
    """Return one server-sent event."""
    return f"data: {json.dumps(data)}\n\n".encode()


def usage(reply: Reply) -> dict[str, int]:
    """Return the token counts of the turn."""
    total = reply.prompt_tokens + reply.completion_tokens
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": total,
    }


def _head(request: ChatRequest, reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": request.model}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
