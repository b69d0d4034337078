"""Parsers for the test formats of programming datasets."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plasmid import Prompt
from plasmid.errors import RewardError

FORMS = (
    '{"input": text, "output": text}, {"call": name, "args": [...], "expected": value}, "assert f(1) == 2", a list of '
    'these, or {"inputs": [...], "outputs": [...]} with "fn_name" for functions'
)


@dataclass(frozen=True, slots=True)
class TextCase:
    """Text for standard input, and the output that the program must print."""

    given: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """A call of one of the program's functions, and the value that it must return."""

    function: str
    arguments: tuple[Any, ...]
    expected: Any


Case = TextCase | CallCase


def parse_cases(prompt: Prompt) -> list[Case]:
    """Read the tests from a prompt's target. Raises `RewardError` if the format is unknown."""
    try:
        cases = list(_cases(prompt.target))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise RewardError(
            f"code: prompt {prompt.id}: its target has a test of an unsupported form ({error}); supported are {FORMS}"
        ) from None
    if not cases:
        raise RewardError(f"code: prompt {prompt.id} has no tests; its target must be {FORMS}")
    return cases


def _cases(target: Any) -> list[Case]:
    if isinstance(target, str):
        return [_assertion(target)]
    if isinstance(target, Mapping) and "inputs" in target:
        pairs = zip(target["inputs"], target["outputs"], strict=True)
        name = target.get("fn_name")
        if name is None:
            return [TextCase(_lines(given), _lines(expected)) for given, expected in pairs]
        return [CallCase(str(name), tuple(given), expected) for given, expected in pairs]
    if isinstance(target, Mapping) and "call" in target:
        return [CallCase(str(target["call"]), tuple(target["args"]), target["expected"])]
    if isinstance(target, Mapping):
        return [TextCase(_lines(target["input"]), _lines(target["output"]))]
    if isinstance(target, Sequence):
        return [case for item in target for case in _cases(item)]
    raise TypeError(f"got {target!r}")


def is_case(test: str) -> bool:
    """Return whether a test is an assertion that can be converted to a `CallCase`."""
    try:
        _assertion(test)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _lines(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))


def _assertion(text: str) -> CallCase:
    """Convert ``assert f(1, [2]) == 3`` to a call, so that the comparison runs outside the program's reach."""
    (statement,) = ast.parse(text.strip()).body
    test = statement.test if isinstance(statement, ast.Assert) else None
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        raise ValueError(f"not a comparison of a call with ==: {text[:80]!r}")
    call, expected = test.left, test.comparators[0]
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
        raise ValueError(f"not a plain call: {text[:80]!r}")
    arguments = tuple(_json(ast.literal_eval(argument)) for argument in call.args)
    return CallCase(call.func.id, arguments, _json(ast.literal_eval(expected)))


def _json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, int | float | str | None):
        return value
    raise ValueError(f"{value!r} is not a JSON value")


def same_text(expected: str, printed: str) -> bool:
    """Compare line by line, ignoring trailing spaces and trailing empty lines."""
    return _trim_lines(expected) == _trim_lines(printed)


def _trim_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same_value(expected: Any, returned: Any) -> bool:
    """Compare two JSON values. Numbers may differ by a relative 1e-6; tuples count as lists."""
    if isinstance(expected, bool) or isinstance(returned, bool):
        return expected is returned
    if isinstance(expected, float) or isinstance(returned, float):
        numbers = isinstance(expected, int | float) and isinstance(returned, int | float)
        try:
            return numbers and math.isclose(expected, returned, rel_tol=1e-6, abs_tol=1e-9)
        except OverflowError:  # the integer is too large for a float
            return False
    if isinstance(expected, list | tuple) and isinstance(returned, list):
        return len(expected) == len(returned) and all(map(same_value, expected, returned))
    if isinstance(expected, Mapping) and isinstance(returned, Mapping):
        return expected.keys() == returned.keys() and all(same_value(expected[k], returned[k]) for k in expected)
    return type(expected) is type(returned) and bool(expected == returned)
