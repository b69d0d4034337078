"""Parsers for tool calls between special tokens, as GLM-4.5, DeepSeek-V3, Kimi-K2 and gpt-oss write them.

They never raise, and take time linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .parsing import MAX_CALL_LENGTH, Parsed, ToolCall, parse_named_call, parse_or_text, split_blocks

DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_SEP = (
    "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"
    for name in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_CALL_END, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
HARMONY_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
HARMONY_RECIPIENT = re.compile(r"(?<!\S)to=([^\s<]{1,200})")
HARMONY_CHANNEL = re.compile(r"<\|channel\|>\s*(\w{1,40})")
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>")


def glm(text: str) -> Parsed:
    """Parse ``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``, as written by GLM-4.5 and later.

    Values are JSON or, if they are not, text.
    """
    rest, bodies = split_blocks(text, "<tool_call>", "</tool_call>")
    return Parsed(text=rest, calls=tuple(_from_keys(body[:MAX_CALL_LENGTH]) for body in bodies))


def deepseek_v3(text: str) -> Parsed:
    """Parse ``function<sep>f``, then the arguments in a ``json`` fence, as written by DeepSeek-V3 and R1."""
    rest, bodies = _section(text, DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END)
    return Parsed(text=rest, calls=tuple(_from_fence(body) for body in bodies))


def deepseek_v31(text: str) -> Parsed:
    """Parse ``f<sep>{...}``, as written by DeepSeek-V3.1."""
    rest, bodies = _section(text, DEEPSEEK_BEGIN, DEEPSEEK_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END)
    return Parsed(text=rest, calls=tuple(_from_parts(body, DEEPSEEK_SEP) for body in bodies))


def kimi_k2(text: str) -> Parsed:
    """Parse ``functions.f:0<argument_begin>{...}``, as written by Kimi-K2. Its id becomes that of the result."""
    rest, bodies = _section(text, KIMI_BEGIN, KIMI_END, KIMI_CALL, KIMI_CALL_END)
    return Parsed(text=rest, calls=tuple(_from_kimi(body) for body in bodies))


def harmony(text: str) -> Parsed:
    """Parse messages of gpt-oss: ``<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>``.

    The answer consists of the final channel and of comments for the user; analysis is reasoning.
    """
    if not any(mark in text for mark in HARMONY_MARKS):
        return Parsed(text=text)
    answers, thoughts, calls = list[str](), list[str](), list[ToolCall]()
    for segment in text.split("<|start|>"):
        header, mark, content = segment.partition("<|message|>")
        if not mark:
            continue
        content = HARMONY_ENDS.split(content, maxsplit=1)[0]
        recipient, channel = HARMONY_RECIPIENT.search(header[:1000]), HARMONY_CHANNEL.search(header[:1000])
        if recipient is not None:
            calls.append(parse_named_call(recipient[1].removeprefix("functions."), content))
        elif channel is not None and channel[1] == "analysis":
            thoughts.append(content)
        else:
            answers.append(content)
    answer = "".join(answers)
    return Parsed(text=answer, calls=tuple(calls), answer=answer, reasoning="\n".join(thoughts))


def _section(text: str, begin: str, end: str, call: str, call_end: str) -> tuple[str, list[str]]:
    """Return the text outside of sections of calls, and the bodies of all calls in them; ends may be missing."""
    rest, sections = split_blocks(text, begin, end)
    return rest, [body for section in sections for body in _bodies(section, call, call_end)]


def _bodies(section: str, begin: str, end: str) -> Iterator[str]:
    before, *pieces = section.split(begin)
    if not pieces:
        yield before  # its parser then reports a section without calls as an error
    for piece in pieces:
        yield piece.partition(end)[0]


def _from_keys(body: str) -> ToolCall:
    head, *pieces = body.split("<arg_key>")
    name, arguments = head.strip(), dict[str, object]()
    if not name or len(name) > 200 or "\n" in name:
        return ToolCall(name="", error="a call is NAME, then <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>")
    for piece in pieces:
        key, closed, rest = piece.partition("</arg_key>")
        _, opened, value = rest.partition("<arg_value>")
        if not closed or not opened:
            return ToolCall(name=name, error="an argument is <arg_key>NAME</arg_key><arg_value>VALUE</arg_value>")
        arguments[key.strip()] = parse_or_text(value.partition("</arg_value>")[0].strip("\n"))
    return ToolCall(name=name, arguments=arguments)


def _from_fence(body: str) -> ToolCall:
    kind, mark, rest = body.partition(DEEPSEEK_SEP)
    name, fence, arguments = rest.partition("```json")
    if not mark or not fence or kind.strip() != "function" or not name.strip():
        return ToolCall(name="", error=f"a call is function{DEEPSEEK_SEP}NAME, then its arguments in a ```json fence")
    return parse_named_call(name.strip()[:200], arguments.rpartition("```")[0] or arguments)


def _from_parts(body: str, separator: str) -> ToolCall:
    name, mark, arguments = body.partition(separator)
    if not mark or not name.strip():
        return ToolCall(name="", error=f'a call is NAME{separator}{{"ARGUMENT": VALUE}}')
    return parse_named_call(name.strip()[:200], arguments)


def _from_kimi(body: str) -> ToolCall:
    identity, mark, arguments = body.partition(KIMI_ARGUMENTS)
    identity = identity.strip()
    name, colon, number = identity.removeprefix("functions.").rpartition(":")
    if not mark or not colon or not name or not number.isdecimal() or len(identity) > 200:
        return ToolCall(name="", error=f"a call is functions.NAME:NUMBER{KIMI_ARGUMENTS}" + '{"ARGUMENT": VALUE}')
    return parse_named_call(name, arguments, id=identity)
