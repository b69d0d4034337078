"""A filter that is a Python function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from plasmid import Filter, PromptGroup
from plasmid.errors import one_line
from plasmid.plugins.functions import FunctionName
from pydantic import Field, field_validator


class FunctionFilter(Filter):
    """Asks a Python function: it gets the `PromptGroup` and returns True to keep it.

    Dropped groups are counted under the function's name.
    """

    kind: Literal["function"] = "function"
    function: str
    """``module:function`` or ``file.py:function``. The file is imported in every process that filters."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Further arguments by name."""

    @field_validator("function")
    @classmethod
    def _can_be_loaded(cls, value: str) -> str:
        try:
            FunctionName.parse(value).load()
        except ValueError:
            raise
        except Exception as error:  # boundary: importing runs users' code
            raise ValueError(f"{value} cannot be loaded: {one_line(error)}") from error
        return value

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        try:
            inspect.signature(FunctionName.parse(self.function).load()).bind(None, **self.arguments)
        except TypeError as error:
            yield f"arguments: {self.function} is called with (group) and {sorted(self.arguments)}: {error}"

    @property
    def reason(self) -> str:
        return FunctionName.parse(self.function).function

    def __call__(self, group: PromptGroup) -> bool:
        kept = FunctionName.parse(self.function).load()(group, **self.arguments)
        if not isinstance(kept, bool | np.bool_):
            raise TypeError(f"{self.function} must return True or False, got {kept!r:.60}")
        return bool(kept)
