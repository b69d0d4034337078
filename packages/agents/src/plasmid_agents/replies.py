"""From what the policy drew to what an agent gets: stop texts cut off, calls of tools found."""

from __future__ import annotations

import json
from collections.abc import Sequence

from plasmid.components import Rollout
from plasmid.types import Completion, Ints, StopReason
from plasmid_workflows.tools.tool_calls import Parsed, Parser

from .chat import Call, ChatRequest, Finish, Reply


def make_reply(
    rollout: Rollout,
    request: ChatRequest,
    completion: Completion,
    *,
    number: int,
    prompt_tokens: int,
    parser: Parser,
    thinks: bool,
) -> Reply:
    """The reply to a request; ``number`` counts the turns of the rollout, ``thinks`` keeps reasoning apart."""
    written, stopped_by = cut_at_stop(rollout.decode(completion.token_ids), request.stop)
    reasoning, text = split_reasoning(written) if thinks else ("", written)
    calls: tuple[Call, ...] = ()
    if request.tools and stopped_by is None:
        parsed = parser(text)
        if not parsed.calls:
            parsed = _parsed_special(rollout, completion.token_ids, parser, thinks=thinks)
        # a call that cannot be read stays text: no API has a form for it, and agents see what the policy wrote
        if parsed.calls and not any(call.error or not call.name for call in parsed.calls):
            text = parsed.text
            calls = tuple(
                Call(id=call_id(number, i), name=call.name, arguments=json.dumps(dict(call.arguments)))
                for i, call in enumerate(parsed.calls[: 1 if request.one_call else None])
            )
    return Reply(
        id=f"{number:08d}",
        text=text.strip() if calls else text,
        reasoning=reasoning,
        calls=calls,
        finish=_finish(completion, calls, stopped_by),
        stopped_by=stopped_by,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(completion.token_ids),
    )


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first of the stop texts, and which one that was."""
    found = [(at, word) for word in stop if (at := text.find(word)) >= 0]
    if not found:
        return text, None
    at, word = min(found)
    return text[:at], word


def split_reasoning(text: str) -> tuple[str, str]:
    """What stands before ``</think>``, and what behind it. The beginning may be the chat template's part."""
    before, end, after = text.partition("</think>")
    thought = before.strip().removeprefix("<think>").strip()
    if end:
        return thought, after.lstrip()
    return (thought, "") if text.lstrip().startswith("<think>") else ("", text)


def call_id(turn: int, index: int) -> str:
    """Nine letters and digits: what the strictest chat templates take."""
    return f"c{turn % 100_000:05d}{index % 1000:03d}"


def _parsed_special(rollout: Rollout, token_ids: Ints, parser: Parser, *, thinks: bool) -> Parsed:
    """Calls whose marks are special tokens, as in some vocabularies; plain text leaves them out."""
    whole = rollout.decode(token_ids, keep_special=True)
    parsed = parser(split_reasoning(whole)[1] if thinks else whole)
    return Parsed(text=rollout.decode(rollout.encode(parsed.text)), calls=parsed.calls)


def _finish(completion: Completion, calls: Sequence[Call], stopped_by: str | None) -> Finish:
    if calls:
        return "tool_calls"
    return "length" if completion.stop_reason is StopReason.LENGTH and stopped_by is None else "stop"
