"""Arithmetic as a tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from plasmid.components.interaction import Tool, ToolError

from .arithmetic import Number, evaluate


class CalculatorTool(Tool):
    """Evaluates arithmetic expressions."""

    kind: Literal["calculator"] = "calculator"

    def implementation(self) -> Callable[..., Any]:
        return calculate


def calculate(expression: str) -> Number:
    """Evaluate an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and brackets, for example (2 + 3) * 4
    """
    try:
        return evaluate(expression)
    except ValueError as error:
        raise ToolError(str(error)) from None
