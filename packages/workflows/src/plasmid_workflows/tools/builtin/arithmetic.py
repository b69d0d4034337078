"""Safe evaluation of arithmetic expressions written by a policy."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

Number = int | float
MAX_EXPRESSION_LENGTH = 500
"""Maximum length of an expression, in characters."""
LARGEST = 10**100
"""Bound on the absolute value of every intermediate result."""
BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def evaluate(expression: str) -> Number:
    """Evaluate numbers, ``+ - * / // % **`` and parentheses. Raises `ValueError` with the reason."""
    if len(expression) > MAX_EXPRESSION_LENGTH:
        raise ValueError(f"an expression must have at most {MAX_EXPRESSION_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("this is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("a value is too large") from None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else value


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 400:
            raise ValueError("an exponent must be at most 400")
        return _check_size(BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are supported")


def _check_size(value: Number | complex) -> Number:
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the value is not a number")
    if abs(value) > LARGEST:
        raise ValueError("a value is too large")
    return value
