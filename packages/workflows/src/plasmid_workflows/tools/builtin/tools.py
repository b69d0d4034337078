"""Tools that come with Plasmid: a calculator, a search, Python programs, and any Python function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from plasmid.components.interaction import Tool, ToolError
from plasmid.errors import IsolationError
from plasmid.settings.trust import INERT
from plasmid_sandbox import Program, Sandbox, SandboxSettings
from pydantic import Field, field_validator

from ..signatures import import_function, schema
from .arithmetic import Number, evaluate
from .corpus import Hit, open_corpus


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


class FunctionTool(Tool):
    """A Python function. The policy sees its name, its types and its docstring."""

    kind: Literal["function"] = "function"
    function: str
    """``module:function`` or ``file.py:function``."""

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: str) -> str:
        schema(import_function(value))
        return value

    def implementation(self) -> Callable[..., Any]:
        return import_function(self.function)


class PythonTool(Tool):
    """Runs Python programs, each in its own sandbox, and returns their output."""

    kind: Literal["python"] = "python"
    isolated: ClassVar[bool] = False
    sandbox: SandboxSettings = SandboxSettings()
    """Resource limits and permissions of the programs."""

    def warm(self) -> None:
        Sandbox(self.sandbox).check()

    def implementation(self) -> Callable[..., Any]:
        return self.python

    def python(self, code: str) -> str:
        """Run a Python program and read what it prints.

        Args:
            code: a complete program; no state is kept between calls
        """
        outcome = Sandbox(self.sandbox).run(Program(source=code))
        printed = outcome.stdout.decode(errors="replace")
        if outcome.refused:
            raise IsolationError(f"tool python: {outcome.error}")
        if outcome.error is not None:
            raise ToolError(f"{outcome.error}\n{printed}".strip())
        return printed


def check_file(path: str) -> str:
    """Return the path of a file. Raises `ValueError` if there is no such file."""
    if not Path(path).is_file():
        raise ValueError(f"no such file: {path}")
    return path


def format_hits(hits: list[Hit]) -> str:
    """Format documents for the policy."""
    found = [
        f"{number}. {hit.title}: {hit.text}" if hit.title else f"{number}. {hit.text}"
        for number, hit in enumerate(hits, 1)
    ]
    return "\n".join(found) or "nothing was found"


class SearchTool(Tool):
    """Finds documents of a local corpus by keyword (BM25)."""

    kind: Literal["search"] = "search"
    corpus: Annotated[str, INERT]
    """File of documents: ``.jsonl`` with ``text`` (and ``title``), or plain text with one document per paragraph."""
    limit: int = Field(3, ge=1)
    """Maximum number of documents per search."""

    _check_file = field_validator("corpus")(check_file)

    def warm(self) -> None:
        open_corpus(self.corpus)

    def implementation(self) -> Callable[..., Any]:
        return self.search

    def search(self, query: str) -> str:
        """Find documents.

        Args:
            query: words to search for
        """
        return format_hits(open_corpus(self.corpus).search(query, limit=self.limit))
