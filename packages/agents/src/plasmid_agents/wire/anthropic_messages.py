"""Anthropic's messages API: requests, replies as a whole or streamed, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from plasmid.types import Message, SamplingParams
from pydantic import Field

from ..chat import Call, ChatRequest, Problem, Reply, RequestError, add_tool_names, assistant_message
from .fields import Body, Content, TextPart, content_text, find_unsupported, pieces, read

NO_EFFECT = frozenset(("metadata", "service_tier", "cache_control", "inference_geo", "betas"))
"""Fields that do not affect the text."""
ERRORS: Mapping[Problem, tuple[int, str]] = {
    Problem.BAD_REQUEST: (400, "invalid_request_error"),
    Problem.TOO_LONG: (400, "invalid_request_error"),
    Problem.UNKNOWN_SESSION: (401, "authentication_error"),
    Problem.NOT_FOUND: (404, "not_found_error"),
    Problem.NO_BUDGET: (429, "rate_limit_error"),
    Problem.ENGINE: (500, "api_error"),
}


class ToolUse(Body):
    """A tool call in a turn of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Body):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = None


class Thinking(Body):
    """Another model's reasoning in the client's history; it is not shown to the policy."""

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextPart | ToolUse | ToolResult | Thinking, Field(discriminator="type")]


class InMessage(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Body):
    """A tool that the policy may call."""

    name: str
    description: str = ""
    input_schema: dict[str, Any]


class ToolChoice(Body):
    """Whether tools may be called."""

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool = False


class CountBody(Body):
    """A conversation whose tokens should be counted."""

    model: str = "policy"
    messages: list[InMessage] = Field(min_length=1)
    system: Content = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """A request for one turn."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None


def parse(data: object, sampling: SamplingParams) -> ChatRequest:
    """Parse a request for a turn. Raises `RequestError`."""
    body = read(MessagesBody, data)
    return _request(
        body,
        sampling,
        max_tokens=body.max_tokens,
        stop=tuple(text for text in body.stop_sequences or () if text),
        stream=bool(body.stream),
    )


def parse_count(data: object, sampling: SamplingParams) -> ChatRequest:
    """Parse a conversation whose tokens should be counted. Raises `RequestError`."""
    return _request(read(CountBody, data), sampling)


def _request(body: CountBody, sampling: SamplingParams, **fields: Any) -> ChatRequest:
    unsupported = list(find_unsupported(body, sampling, no_effect=NO_EFFECT))
    choice = body.tool_choice or ToolChoice(type="auto")
    if choice.type in ("any", "tool"):
        unsupported.append(f"tool_choice = {choice.type}")
    if body.thinking is not None and body.thinking.get("type") != "disabled":
        unsupported.append(f"thinking = {body.thinking!s:.80}")
    system: list[Message] = [{"role": "system", "content": content_text(body.system)}] if body.system else []
    return ChatRequest(
        model=body.model,
        messages=add_tool_names([*system, *(m for message in body.messages for m in _messages(message))]),
        tools=() if choice.type == "none" else tuple(_function(tool) for tool in body.tools or ()),
        one_call=choice.disable_parallel_tool_use,
        unsupported=tuple(unsupported),
        **fields,
    )


def _messages(message: InMessage) -> Iterator[Message]:
    """Convert a message's blocks to messages for chat templates: each tool result is a separate one."""
    blocks = message.content
    if isinstance(blocks, str):
        blocks = [TextPart(type="text", text=blocks)]
    text = "\n".join(block.text for block in blocks if isinstance(block, TextPart))
    if message.role == "assistant":
        calls = [block for block in blocks if isinstance(block, ToolUse)]
        yield assistant_message(text, [Call(id=c.id, name=c.name, arguments=json.dumps(c.input)) for c in calls])
        return
    results = [block for block in blocks if isinstance(block, ToolResult)]
    for result in results:
        yield {"role": "tool", "content": content_text(result.content), "tool_call_id": result.tool_use_id}
    if text or not results:
        yield {"role": message.role, "content": text}


def _function(tool: Tool) -> Mapping[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def answer(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """Return the whole reply."""
    # the format requires a signature; nothing here is signed
    thought = [{"type": "thinking", "thinking": reply.reasoning, "signature": ""}] if reply.reasoning else []
    text = [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in reply.calls
    ]
    return {
        **_head(request, reply),
        "content": [*thought, *text, *calls],
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stopped_by,
        "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    }


def events(request: ChatRequest, reply: Reply) -> Iterator[bytes]:
    """Return the same reply as a stream of events."""
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    tokens = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
    yield event("message_start", message={**_head(request, reply), **empty, "usage": tokens})
    for index, block in enumerate(answer(request, reply)["content"]):
        start, whole, kind, name = _split_block(block)
        yield event("content_block_start", index=index, content_block=start)
        for piece in pieces(whole):
            yield event("content_block_delta", index=index, delta={"type": kind, name: piece})
        yield event("content_block_stop", index=index)
    delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_by}
    yield event("message_delta", delta=delta, usage={"output_tokens": reply.completion_tokens})
    yield event("message_stop")


def _split_block(block: Mapping[str, Any]) -> tuple[dict[str, Any], str, str, str]:
    """Return a block without its content, the content as text, and the kind and field of its pieces."""
    name = block["type"]
    if name == "tool_use":
        return {**block, "input": {}}, json.dumps(block["input"]), "input_json_delta", "partial_json"
    field = "text" if name == "text" else "thinking"
    return {**block, field: ""}, block[field], f"{field}_delta", field


def refusal(error: RequestError) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error."""
    status, kind = ERRORS[error.problem]
    # clients detect this prefix to decide whether to shorten the conversation
    text = f"prompt is too long: {error.text}" if error.problem is Problem.TOO_LONG else error.text
    return status, {"type": "error", "error": {"type": kind, "message": text}}


def refusal_event(error: RequestError) -> bytes:
    """Return an error in the middle of a stream."""
    return event("error", error=refusal(error)[1]["error"])


def event(kind: str, **data: Any) -> bytes:
    """Return one server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def _head(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.id}", "type": "message", "role": "assistant", "model": request.model}


def _stop_reason(reply: Reply) -> str:
    if reply.stopped_by is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish]
