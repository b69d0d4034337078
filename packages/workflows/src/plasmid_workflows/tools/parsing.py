"""Types and helpers of the parsers for tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAX_CALL_LENGTH = 100_000
"""Maximum length of one call that is parsed, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, or the reason why it is invalid."""

    name: str
    """Empty if the text does not name one."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Sent to the policy instead of a result."""
    id: str = ""
    """The call's id in the text, which the template shows with the result; empty if the format has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The text and the calls of a turn."""

    text: str
    """The turn without its calls."""
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    """The text for the user, if the format marks it with special tokens; None if it is the whole turn."""
    reasoning: str = ""
    """The reasoning, if the format marks it."""


Parser = Callable[[str], Parsed]


def split_blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Return the text without its blocks, and the blocks' contents; the last block may lack its end."""
    before, *pieces = text.split(begin)
    rest, bodies = [before], []
    for piece in pieces:
        body, _, after = piece.partition(end)
        bodies.append(body.strip())
        rest.append(after)
    return ("".join(rest) if bodies else text), bodies


def parse_named_call(name: str, body: str, *, id: str = "") -> ToolCall:
    """Create a call from a name and arguments as JSON text."""
    value, error = parse_json(body)
    if error is not None:
        return ToolCall(name=name, error=error, id=id)
    return replace(make_call({"name": name, "arguments": value}), id=id)


def make_call(value: Any) -> ToolCall:
    """Create a call from an object with ``name`` and ``arguments``, as read from JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(name="", error='a call is an object with "name" and "arguments"')
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        arguments, error = parse_json(arguments)
        if error is not None:
            return ToolCall(name=value["name"], error=error)
    if not isinstance(arguments, dict):
        return ToolCall(name=value["name"], error='"arguments" of a call must be an object')
    return ToolCall(name=value["name"], arguments=arguments)


def parse_json(text: str) -> tuple[Any, str | None]:
    """Return the value, or the reason why it is invalid."""
    try:
        return json.loads(text[:MAX_CALL_LENGTH]), None
    except (ValueError, RecursionError) as error:
        return None, f"the call is not valid JSON: {reason_of(error)}"


def parse_or_text(text: str) -> Any:
    """Return a JSON value if the text is one, else the text."""
    value, error = parse_json(text)
    return text if error is not None else value


def reason_of(error: BaseException) -> str:
    """Return the first line of an error, starting in lower case to follow other text."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text[:1].lower() + text[1:200]
