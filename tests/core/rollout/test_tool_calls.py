"""Tool calls in generated text: formats of model families, and malformed text."""

import random
import re
import string
import sys

import pytest
from plasmid_workflows.tools.tool_calls import EXAMPLES, PARSERS

ADD = {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}


def deepseek(text):
    """Write DeepSeek's special tokens, which contain non-ASCII bars and spaces."""
    return re.sub(r"<\|(tool_\w+|end_of_sentence)\|>", lambda m: f"<\uff5c{m[1]}\uff5c>".replace("_", "\u2581"), text)


DEEPSEEK_V3 = deepseek(
    "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>{}\n```json\n{}\n```<|tool_call_end|>"
    "<|tool_calls_end|><|end_of_sentence|>"
)
DEEPSEEK_V31 = deepseek(
    "<|tool_calls_begin|><|tool_call_begin|>{}<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>"
)
HARMONY = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
ARGUMENTS = '{"a": 1, "b": [2, "x"]}'
WRITTEN = {
    "deepseek-v3": "so: " + DEEPSEEK_V3.format("add", ARGUMENTS),
    "deepseek-v3.1": "so: " + DEEPSEEK_V31.format("add", ARGUMENTS),
    "glm": (
        "so:\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        '<arg_value>[2, "x"]</arg_value>\n</tool_call>'
    ),
    "harmony": "<|channel|>analysis<|message|>A sum.<|end|>" + HARMONY.format("add", ARGUMENTS),
    "hermes": 'so: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>',
    "kimi-k2": "so: " + KIMI.format("functions.add:0", ARGUMENTS),
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
    # GLM-4.7 writes no line breaks; strings are not quoted
    (
        "glm",
        "<tool_call>f<arg_key>x</arg_key><arg_value>a b</arg_value></tool_call><tool_call>g</tool_call>",
        [("f", {"x": "a b"}, None), ("g", {}, None)],
    ),
    ("glm", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>two\nlines", [("f", {"x": "two\nlines"}, None)]),
    ("glm", "<tool_call>f\n<arg_key>x</arg_key></tool_call>", [("f", {}, "an argument is <arg_key>NAME</arg_key>")]),
    ("glm", "<tool_call>f<arg_key>x<arg_value>1</tool_call>", [("f", {}, "an argument is <arg_key>NAME</arg_key>")]),
    ("glm", "<tool_call></tool_call>", [("", {}, "a call is NAME, then <arg_key>")]),
    ("glm", '<tool_call>{\n"name": "f"}</tool_call>', [("", {}, "a call is NAME, then <arg_key>")]),
    (
        "deepseek-v3",
        deepseek(
            "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>f\n```json\n{}\n```<|tool_call_end|>\n"
            '<|tool_call_begin|>function<|tool_sep|>g\n```json\n{"x": 1}\n```<|tool_call_end|><|tool_calls_end|>'
        ),
        [("f", {}, None), ("g", {"x": 1}, None)],
    ),
    ("deepseek-v3", DEEPSEEK_V3.format("f", '{"x": "```"}'), [("f", {"x": "```"}, None)]),
    ("deepseek-v3", DEEPSEEK_V3.format("f", "{x}"), [("f", {}, "the call is not valid JSON")]),
    ("deepseek-v3", DEEPSEEK_V31.format("f", "{}"), [("", {}, deepseek("a call is function<|tool_sep|>NAME"))]),
    ("deepseek-v3", deepseek("<|tool_calls_begin|>f()"), [("", {}, deepseek("a call is function<|tool_sep|>NAME"))]),
    ("deepseek-v3.1", DEEPSEEK_V31.format("f", "[1]"), [("f", {}, '"arguments" of a call must be an object')]),
    (
        "deepseek-v3.1",
        deepseek('<|tool_calls_begin|><|tool_call_begin|>f<|tool_sep|>{"x": 1}'),
        [("f", {"x": 1}, None)],
    ),
    (
        "deepseek-v3.1",
        deepseek("<|tool_calls_begin|><|tool_calls_end|>"),
        [("", {}, deepseek("a call is NAME<|tool_sep|>"))],
    ),
    ("kimi-k2", KIMI.format("functions.a.b:12", '{"x": 1}'), [("a.b", {"x": 1}, None)]),
    ("kimi-k2", KIMI.format(" functions.f:0 ", "{"), [("f", {}, "the call is not valid JSON")]),
    ("kimi-k2", KIMI.format("functions.f", "{}"), [("", {}, "a call is functions.NAME:NUMBER")]),
    ("kimi-k2", KIMI.format("3", "{}"), [("", {}, "a call is functions.NAME:NUMBER")]),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{}", [("f", {}, None)]),
    # the template puts the recipient before the channel
    (
        "harmony",
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        [("f", {"x": 1}, None)],
    ),
    (
        "harmony",
        "<|channel|>analysis to=python code<|message|>1+1<|call|>",
        [("python", {}, "the call is not valid JSON")],
    ),
    ("harmony", HARMONY.format("f", "{x}"), [("f", {}, "the call is not valid JSON")]),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json", []),
]


@pytest.mark.parametrize("format", PARSERS)
def test_each_format_is_read(format):
    parsed = PARSERS[format](WRITTEN[format])
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.error) == (ADD["name"], ADD["arguments"], None)
    assert "add" not in parsed.text


def test_channels_of_harmony_are_separated():
    parsed = PARSERS["harmony"](
        "<|channel|>analysis<|message|>Two tools.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment. "
        "<|end|>" + HARMONY.format("f", "{}")
    )
    assert (parsed.answer, parsed.reasoning, [call.name for call in parsed.calls]) == (
        "One moment. ",
        "Two tools.",
        ["f"],
    )
    parsed = PARSERS["harmony"](
        "<|channel|>analysis<|message|>So 4.<|end|><|start|>assistant<|channel|>final<|message|>4"
    )
    assert (parsed.answer, parsed.reasoning, parsed.calls) == ("4", "So 4.", ())
    parsed = PARSERS["harmony"]("<|channel|>analysis<|message|>I do not come to an")
    assert (parsed.answer, parsed.reasoning) == ("", "I do not come to an")


def test_the_id_of_a_call_is_that_of_its_text():
    (call,) = PARSERS["kimi-k2"](WRITTEN["kimi-k2"]).calls
    assert call.id == "functions.add:0"


def steps_of(format, text):
    """Return how many lines of Python a parser executes."""
    count = 0

    def tracer(frame, event, argument):
        nonlocal count
        count += 1
        return tracer

    sys.settrace(tracer)
    try:
        PARSERS[format](text)
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("format", ["deepseek-v3", "deepseek-v3.1", "glm", "harmony", "kimi-k2"])
def test_twice_as_many_marks_take_twice_as_many_steps(format):
    marks = [piece for text in (WRITTEN[format], EXAMPLES[format]) for piece in re.findall(r"<[^<>]*>", text)]
    for mark in dict.fromkeys(marks):
        once, twice = (steps_of(format, mark * count) for count in (2000, 4000))
        assert twice < 2.2 * once + 100


@pytest.mark.parametrize(("format", "text", "expected"), MORE)
def test_forms_and_mistakes(format, text, expected):
    found = [(call.name, dict(call.arguments), call.error) for call in PARSERS[format](text).calls]
    assert len(found) == len(expected)
    for (name, arguments, error), wanted in zip(found, expected, strict=True):
        assert (name, arguments) == wanted[:2]
        assert (error is None) == (wanted[2] is None) and str(error).startswith(str(wanted[2]))


@pytest.mark.parametrize("format", PARSERS)
def test_text_without_calls_is_unchanged(format):
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
