"""OpenAI's legacy completions: a text to continue. Errors have the form of those of chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from plasmid.types import SamplingParams

from ..chat import ChatRequest, Problem, Reply, RequestError
from .fields import find_unsupported, pieces, read
from .openai_chat import NO_EFFECT, CommonFields, event, refusal, refusal_event, usage

__all__ = ["answer", "events", "parse", "refusal", "refusal_event"]


class TextBody(CommonFields):
    """A text to continue."""

    prompt: str | list[str]


def parse(data: object, sampling: SamplingParams) -> ChatRequest:
    """Parse a request for a turn. Raises `RequestError`."""
    body = read(TextBody, data)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(prompts) != 1 or not prompts[0]:
        raise RequestError(Problem.BAD_REQUEST, f"prompt: must be one non-empty string, got {len(prompts)}")
    return ChatRequest(
        **body.shared(),
        text=prompts[0],
        max_tokens=body.max_tokens,
        unsupported=tuple(find_unsupported(body, sampling, no_effect=NO_EFFECT)),
    )


def answer(request: ChatRequest, reply: Reply) -> dict[str, Any]:
    """Return the whole reply."""
    return {**_chunk(request, reply, reply.text, reply.finish), "usage": usage(reply)}


def events(request: ChatRequest, reply: Reply) -> Iterator[bytes]:
    """Return the same reply as a stream of events."""
    for piece in pieces(reply.text):
        yield event(_chunk(request, reply, piece, None))
    yield event(_chunk(request, reply, "", reply.finish))
    if request.stream_usage:
        yield event({**_chunk(request, reply, "", None), "choices": [], "usage": usage(reply)})
    yield b"data: [DONE]\n\n"


def _chunk(request: ChatRequest, reply: Reply, text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    head = {"id": f"cmpl-{reply.id}", "object": "text_completion", "created": int(time.time()), "model": request.model}
    return {**head, "choices": [choice]}
