"""Calls in generated text: the formats of models, and rubbish."""

import random
import string

import pytest
from plasmid_workflows.tools.tool_calls import EXAMPLES, PARSERS

ADD = {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}
WRITTEN = {
    "hermes": 'so: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}<|eom_id|>',
    "mistral": 'so[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}]</s>',
    "python": '[add(a=1, b=[2, "x"])]',
    "qwen-xml": (
        '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, "x"]\n</parameter>\n'
        "</function>\n</tool_call>"
    ),
}
MORE = [
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1}, None)]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", {}, None)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', [("f", {}, None)]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        [("f", {}, '"arguments" of a call must be an object')],
    ),
    ("hermes", "<tool_call>{'name': 1}</tool_call>", [("", {}, "the call is not valid JSON: expecting property name")]),
    (
        "llama3",
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 1}}',
        [("f", {}, None), ("g", {"x": 1}, None)],
    ),
    ("llama3", '{"answer": 4}', []),
    ("llama3", "it is {4}", []),
    ("llama3", '{"name": "f", "parameters": {', [("", {}, "the call is not valid JSON")]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]1[ARGS]{}', [("f", {"a": 1}, None), ("g", {}, None)]),
    ("python", "```tool_code\nf(x=1)\nlib.g(y='z')\n```", [("f", {"x": 1}, None), ("lib.g", {"y": "z"}, None)]),
    ("python", "[f(1)]", [("f", {}, "arguments of a call must have names")]),
    ("python", "[f(x=open('/etc'))]", [("f", {}, "arguments of a call must be plain values")]),
    ("python", "[f(x=1), 2]", [("f", {"x": 1}, None), ("", {}, "a call is NAME(argument=value, ...)")]),
    ("python", "see [1, 2] and (3)", []),
    (
        "qwen-xml",
        "<tool_call><function=f><parameter=x>a b</parameter></function></tool_call>",
        [("f", {"x": "a b"}, None)],
    ),
    ("qwen-xml", "<tool_call>f</tool_call>", [("", {}, "a call is <function=NAME>")]),
]


@pytest.mark.parametrize("format", PARSERS)
def test_each_format_is_read(format):
    parsed = PARSERS[format](WRITTEN[format])
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error) == (ADD["name"], ADD["arguments"], None)
    assert "add" not in parsed.text


@pytest.mark.parametrize(("format", "text", "expected"), MORE)
def test_forms_and_mistakes(format, text, expected):
    found = [(call.name, dict(call.arguments), call.error) for call in PARSERS[format](text).calls]
    assert len(found) == len(expected)
    for (name, arguments, error), wanted in zip(found, expected, strict=True):
        assert (name, arguments) == wanted[:2]
        assert (error is None) == (wanted[2] is None) and str(error).startswith(str(wanted[2]))


@pytest.mark.parametrize("format", PARSERS)
def test_text_without_calls_is_left_as_it_is(format):
    parsed = PARSERS[format]("The sum is 4.")
    assert (parsed.text, parsed.calls) == ("The sum is 4.", ())


@pytest.mark.parametrize("format", PARSERS)
def test_no_text_raises(format):
    draw = random.Random(0)
    pieces = [*EXAMPLES.values(), *WRITTEN.values(), *string.punctuation, "\x00", "NaN", "1e999", "[[", "{{", "\\u12"]
    nasty = ["(" * 3000, "[" * 100_000, '{"a":' * 50_000, "<tool_call>" * 1000, "[f(" + "-" * 5000 + "1)]", "9" * 5000]
    for text in nasty:
        for wrapped in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f"[f(x={text})]"):
            PARSERS[format](wrapped)
    for _ in range(500):
        PARSERS[format]("".join(draw.choice(pieces) for _ in range(draw.randint(1, 12))))
