"""Parsers for tool calls in generated text, in the formats that models are trained to write. They never raise."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .marked_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    deepseek_v3,
    deepseek_v31,
    glm,
    harmony,
    kimi_k2,
)
from .parsing import (
    MAX_CALL_LENGTH,
    Parsed,
    Parser,
    ToolCall,
    make_call,
    parse_json,
    parse_named_call,
    parse_or_text,
    reason_of,
    split_blocks,
)

FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*?)(?:</function>|$)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def hermes(text: str) -> Parsed:
    """Parse ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as written by Hermes, Qwen and others."""
    rest, bodies = split_blocks(text, "<tool_call>", "</tool_call>")
    return Parsed(text=rest, calls=tuple(_from_json(body) for body in bodies))


def qwen_xml(text: str) -> Parsed:
    """Parse ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``, as written by Qwen3-Coder."""
    rest, bodies = split_blocks(text, "<tool_call>", "</tool_call>")
    return Parsed(text=rest, calls=tuple(_from_xml(body) for body in bodies))


def llama3(text: str) -> Parsed:
    """Parse ``{"name": ..., "parameters": {...}}``, one or several in a row, as written by Llama 3."""
    found = text.find("<|python_tag|>")
    start = found + len("<|python_tag|>") if found >= 0 else len(text) - len(text.lstrip())
    body = text[start:].strip()
    if not body.startswith("{"):
        return Parsed(text=text)
    values, error = _json_values(body)
    calls = [make_call(value) for value in values if isinstance(value, dict) and "name" in value]
    if error is not None and (found >= 0 or '"name"' in body[:MAX_CALL_LENGTH]):
        calls.append(ToolCall(name="", error=error))
    return Parsed(text=text[: max(found, 0)], calls=tuple(calls)) if calls else Parsed(text=text)


def mistral(text: str) -> Parsed:
    """Parse Mistral's ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name[ARGS]{...}``."""
    before, *bodies = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for body in bodies:
        name, args, arguments = body.removesuffix("</s>").strip().partition("[ARGS]")
        calls += [parse_named_call(name.partition("[CALL_ID]")[0].strip(), arguments)] if args else _from_list(name)
    return Parsed(text=before, calls=tuple(calls))


def python(text: str) -> Parsed:
    """Parse ``[f(x=1), g(y="a")]``, as written by Llama 4 and others, or calls line by line in a ``tool_code``
    fence."""
    rest, bodies = split_blocks(text, "```tool_code\n", "```")
    if not bodies:
        body = text.replace("<|python_start|>", "").replace("<|python_end|>", "").strip()
        if not (body.startswith("[") and body.endswith("]") and "(" in body):
            return Parsed(text=text)
        rest, bodies = "", [body]
    return Parsed(text=rest, calls=tuple(call for body in bodies for call in _from_python(body)))


PARSERS: Mapping[str, Parser] = {
    "deepseek-v3": deepseek_v3,
    "deepseek-v3.1": deepseek_v31,
    "glm": glm,
    "harmony": harmony,
    "hermes": hermes,
    "kimi-k2": kimi_k2,
    "llama3": llama3,
    "mistral": mistral,
    "python": python,
    "qwen-xml": qwen_xml,
}
"""Parsers by format name. They take text with its special tokens."""

EXAMPLES: Mapping[str, str] = {
    "deepseek-v3": (
        f"{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}function{DEEPSEEK_SEP}NAME\n```json\n"
        f'{{"ARGUMENT": VALUE}}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_END}'
    ),
    "deepseek-v3.1": (
        f'{DEEPSEEK_BEGIN}{DEEPSEEK_CALL}NAME{DEEPSEEK_SEP}{{"ARGUMENT": VALUE}}{DEEPSEEK_CALL_END}{DEEPSEEK_END}'
    ),
    "glm": "<tool_call>NAME\n<arg_key>ARGUMENT</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"ARGUMENT": VALUE}<|call|>',
    "hermes": '<tool_call>{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}</tool_call>',
    "kimi-k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"ARGUMENT": VALUE}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "llama3": '{"name": "NAME", "parameters": {"ARGUMENT": VALUE}}',
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}]',
    "python": "[NAME(ARGUMENT=VALUE)]",
    "qwen-xml": "<tool_call><function=NAME><parameter=ARGUMENT>VALUE</parameter></function></tool_call>",
}
"""An example call per format name, for models that need instructions on how to write one."""


def _from_json(body: str) -> ToolCall:
    value, error = parse_json(body)
    return ToolCall(name="", error=error) if error is not None else make_call(value)


def _from_list(body: str) -> list[ToolCall]:
    value, error = parse_json(body)
    if error is not None:
        return [ToolCall(name="", error=error)]
    return [make_call(item) for item in (value if isinstance(value, list) else [value])]


def _json_values(text: str) -> tuple[list[Any], str | None]:
    """Return consecutive JSON values, separated by nothing, spaces or semicolons, and the error in the rest."""
    values: list[Any] = []
    decoder, text, at = json.JSONDecoder(), text[:MAX_CALL_LENGTH], 0
    try:
        while at < len(text) and text[at] == "{":
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            while at < len(text) and text[at] in " \t\r\n;":
                at += 1
    except (ValueError, RecursionError) as error:
        return values, f"the call is not valid JSON: {reason_of(error)}"
    return values, None


def _from_xml(body: str) -> ToolCall:
    found = FUNCTION.match(body[:MAX_CALL_LENGTH])
    if found is None:
        return ToolCall(name="", error="a call is <function=NAME> with <parameter=NAME> inside")
    arguments = {name.strip(): parse_or_text(value.strip("\n")) for name, value in PARAMETER.findall(found[2])}
    return ToolCall(name=found[1].strip(), arguments=arguments)


def _from_python(body: str) -> Iterator[ToolCall]:
    try:
        tree = ast.parse(body[:MAX_CALL_LENGTH].strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield ToolCall(name="", error=f"the call is not valid Python: {reason_of(error)}")
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
