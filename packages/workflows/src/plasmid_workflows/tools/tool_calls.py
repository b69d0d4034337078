"""Parsers for tool calls in generated text, in the formats that models are trained to write. They never raise."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST = 100_000
"""Maximum length of one call that is parsed, in characters."""
FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*?)(?:</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, or the reason why it is invalid."""

    name: str
    """Empty if the text does not name one."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    """Sent to the policy instead of a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The text and the calls of a turn."""

    text: str
    """The turn without its calls."""
    calls: tuple[ToolCall, ...] = ()


Parser = Callable[[str], Parsed]


def hermes(text: str) -> Parsed:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as written by Hermes, Qwen and others."""
    rest, bodies = _blocks(text, "<tool_call>", "</tool_call>")
    return Parsed(text=rest, calls=tuple(_from_json(body) for body in bodies))


def qwen_xml(text: str) -> Parsed:
    """Parse ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``, as written by Qwen3-Coder."""
    rest, bodies = _blocks(text, "<tool_call>", "</tool_call>")
    return Parsed(text=rest, calls=tuple(_from_xml(body) for body in bodies))


def llama3(text: str) -> Parsed:
    """Parse ``{"name": ..., "parameters": {...}}``, one or several in a row, as written by Llama 3."""
    found = text.find("<|python_tag|>")
    start = found + len("<|python_tag|>") if found >= 0 else len(text) - len(text.lstrip())
    body = text[start:].strip()
    if not body.startswith("{"):
        return Parsed(text=text)
    values, error = _json_values(body)
    calls = [_call_of(value) for value in values if isinstance(value, dict) and "name" in value]
    if error is not None and (found >= 0 or '"name"' in body[:LONGEST]):
        calls.append(ToolCall(name="", error=error))
    return Parsed(text=text[: max(found, 0)], calls=tuple(calls)) if calls else Parsed(text=text)


def mistral(text: str) -> Parsed:
    """Parse Mistral's ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name[ARGS]{...}``."""
    before, *bodies = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for body in bodies:
        name, args, arguments = body.removesuffix("</s>").strip().partition("[ARGS]")
        calls += [_parse_named_call(name.partition("[CALL_ID]")[0].strip(), arguments)] if args else _from_list(name)
    return Parsed(text=before, calls=tuple(calls))


def python(text: str) -> Parsed:
    """Parse ``[f(x=1), g(y="a")]``, as written by Llama 4 and others, or calls line by line in a ``tool_code``
    fence."""
    rest, bodies = _blocks(text, "```tool_code\n", "```")
    if not bodies:
        body = text.replace("<|python_start|>", "").replace("<|python_end|>", "").strip()
        if not (body.startswith("[") and body.endswith("]") and "(" in body):
            return Parsed(text=text)
        rest, bodies = "", [body]
    return Parsed(text=rest, calls=tuple(call for body in bodies for call in _from_python(body)))


PARSERS: Mapping[str, Parser] = {
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
    "python": python,
    "qwen-xml": qwen_xml,
}
"""Parsers by format name. They take text with its special tokens."""

EXAMPLES: Mapping[str, str] = {
    "hermes": '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>',
    "llama3": '{"name": "NAME", "parameters": {"ARGUMENT": VALUE}}',
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}]',
    "python": "[NAME(ARGUMENT=VALUE)]",
    "qwen-xml": "<tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter></function></tool_call>",
}
"""An example call per format name, for models that need instructions on how to write one."""


def _blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Return the text without its blocks, and the blocks' contents; the last block may lack its end."""
    before, *pieces = text.split(begin)
    rest, bodies = [before], []
    for piece in pieces:
        body, _, after = piece.partition(end)
        bodies.append(body.strip())
        rest.append(after)
    return ("".join(rest) if bodies else text), bodies


def _from_json(body: str) -> ToolCall:
    value, error = _json(body)
    return ToolCall(name="", error=error) if error is not None else _call_of(value)


def _from_list(body: str) -> list[ToolCall]:
    value, error = _json(body)
    if error is not None:
        return [ToolCall(name="", error=error)]
    return [_call_of(item) for item in (value if isinstance(value, list) else [value])]


def _parse_named_call(name: str, body: str) -> ToolCall:
    value, error = _json(body)
    return ToolCall(name=name, error=error) if error is not None else _call_of({"name": name, "arguments": value})


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(name="", error='a call is an object with "name" and "arguments"')
    arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        arguments, error = _json(arguments)
        if error is not None:
            return ToolCall(name=value["name"], error=error)
    if not isinstance(arguments, dict):
        return ToolCall(name=value["name"], error='"arguments" of a call must be an object')
    return ToolCall(name=value["name"], arguments=arguments)


def _json(text: str) -> tuple[Any, str | None]:
    """Return the value, or the reason why it is invalid."""
    try:
        return json.loads(text[:LONGEST]), None
    except (ValueError, RecursionError) as error:
        return None, f"the call is not valid JSON: {_reason(error)}"


def _json_values(text: str) -> tuple[list[Any], str | None]:
    """Return consecutive JSON values, separated by nothing, spaces or semicolons, and the error in the rest."""
    values: list[Any] = []
    decoder, text, at = json.JSONDecoder(), text[:LONGEST], 0
    try:
        while at < len(text) and text[at] == "{":
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            while at < len(text) and text[at] in " \t\r\n;":
                at += 1
    except (ValueError, RecursionError) as error:
        return values, f"the call is not valid JSON: {_reason(error)}"
    return values, None


def _from_xml(body: str) -> ToolCall:
    found = FUNCTION.match(body[:LONGEST])
    if found is None:
        return ToolCall(name="", error="a call is <function=NAME> with <parameter=NAME> inside")
    arguments = {name.strip(): _parse_or_text(value.strip("\n")) for name, value in PARAMETER.findall(found[2])}
    return ToolCall(name=found[1].strip(), arguments=arguments)


def _parse_or_text(text: str) -> Any:
    """Return a JSON value if the text is one, else the text."""
    value, error = _json(text)
    return text if error is not None else value


def _from_python(body: str) -> Iterator[ToolCall]:
    try:
        tree = ast.parse(body[:LONGEST].strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield ToolCall(name="", error=f"the call is not valid Python: {_reason(error)}")
        return
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr | ast.Assign) else None
        nodes = value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
        for node in nodes:
            yield _python_call(node)


def _python_call(node: ast.AST | None) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return ToolCall(name="", error="a call is NAME(argument=value, ...)")
    name = _join_name(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return ToolCall(name=name, error="arguments of a call must have names: NAME(argument=value, ...)")
    try:
        return ToolCall(name=name, arguments={str(k.arg): ast.literal_eval(k.value) for k in node.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ToolCall(name=name, error="arguments of a call must be plain values: numbers, strings, lists, ...")


def _join_name(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id if isinstance(node, ast.Name) else ""]))


def _reason(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text[:1].lower() + text[1:200]
