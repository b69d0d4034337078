"""A function of the user as a tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from plasmid.components.interaction import Tool
from pydantic import field_validator

from ..signatures import import_function, schema


class FunctionTool(Tool):
    """A Python function: its name, types and docstring are what the policy is told."""

    kind: Literal["function"] = "function"
    function: str
    """Its name: ``module:function``, or ``file.py:function``."""

    @field_validator("function")
    @classmethod
    def _can_be_called(cls, value: str) -> str:
        schema(import_function(value))
        return value

    def implementation(self) -> Callable[..., Any]:
        return import_function(self.function)
