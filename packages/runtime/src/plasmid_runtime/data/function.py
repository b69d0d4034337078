"""Rows that a Python function makes, one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from plasmid.components import DataFacts, PromptEncoder, PromptStream
from plasmid.errors import CheckpointError, DataError, one_line
from plasmid.plugins.functions import FunctionName
from plasmid.types import Prompt
from pydantic import Field, field_validator

from .rows.prompt_rows import as_prompt
from .settings import PromptColumns
from .within import seed_for

LONG_IN_A_ROW = 200
"""Prompts in a row that may be too long before the run ends with an error."""


class Function(PromptColumns):
    """Rows that a Python function makes: it is called with ``seed`` and ``index`` and returns a row as a dict."""

    kind: Literal["function"] = "function"
    function: str
    """``module:function`` or ``file.py:function``. Equal arguments must give equal rows, in every process."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Further arguments by name."""
    seed: int = Field(0, ge=0)
    """Another seed gives other rows; the run's seed counts, too, but not for evaluation sets."""
    size: Literal["endless"] | Annotated[int, Field(ge=1)] = "endless"
    """Rows before the data end. Evaluation sets need a number."""

    @field_validator("function")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        FunctionName.parse(value)
        return value

    def stream(self, encode: PromptEncoder, *, seed: int) -> FunctionStream:
        """Load the function and make the first row. Raises `DataError`."""
        return FunctionStream(self, encode, seed=seed_for(seed, f"train {self.seed}"), label="row")

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """The first `size` rows of another seed than training has."""
        if self.size == "endless":
            raise DataError("data.size: an evaluation set ends; set the number of rows")
        stream = FunctionStream(self, encode, seed=seed_for(self.seed, "eval"), label="eval")
        return iter(stream.draw, None)


class FunctionStream(PromptStream):
    """Row number k depends on the function, the seed and k alone."""

    def __init__(self, source: Function, encode: PromptEncoder, *, seed: int, label: str) -> None:
        self._source, self._encode, self._seed, self._label = source, encode, seed, label
        self._reader, self._function = source.reader(), _load(source.function)
        self._next = 0
        self._drawn = 0
        if not self._prompt(0).messages and (source.system or source.template):
            name = "system" if source.system else "template"
            raise DataError(
                f'data.{name}: has no effect, no prompt is a chat; set data.prompt_as = "chat" or remove it'
            )

    def draw(self) -> Prompt | None:
        """The next prompt; None after `size` rows."""
        for _ in range(LONG_IN_A_ROW):
            if self._source.size != "endless" and self._next >= self._source.size:
                return None
            prompt = self._prompt(self._next)
            self._next += 1
            if self._fits(prompt):
                self._drawn += 1
                return prompt
        raise DataError(
            f"data.max_prompt_tokens: {LONG_IN_A_ROW} prompts in a row were longer than {self._source.limit} tokens; "
            "raise it, or let the function make shorter ones"
        )

    def _fits(self, prompt: Prompt) -> bool:
        limit, tokens = self._source.limit, len(prompt.token_ids)
        if limit is None or tokens <= limit:
            return True
        if self._source.too_long == "drop":
            return False
        raise DataError(
            f"{prompt.id}: the prompt has {tokens} tokens, data.max_prompt_tokens is {limit}; raise it, or set "
            'data.too_long = "drop"'
        )

    def _prompt(self, index: int) -> Prompt:
        row = self._row(index)
        name = f"{self._label}:{index}"
        where = f"{self._source.function} {name}"
        return as_prompt(name, where, self._reader.read(where, row), self._encode, self._source.template)

    def _row(self, index: int) -> Mapping[str, Any]:
        try:
            row = self._function(seed=self._seed, index=index, **self._source.arguments)
        except Exception as error:  # boundary: users' code
            raise DataError(
                f"data.function: {self._source.function} raised at index {index}: {one_line(error)}"
            ) from error
        if not isinstance(row, Mapping):
            raise DataError(
                f"data.function: {self._source.function} must return a row as a dict, got {row!r:.60} at index {index}"
            )
        return row

    def prompt(self, id: str) -> Prompt:
        """The row of an id, made anew."""
        return self._prompt(int(id.rpartition(":")[2]))

    def state(self) -> Mapping[str, Any]:
        """How many rows were made, and a digest of the last one, which proves that the function is still the same."""
        return {"next": self._next, "drawn": self._drawn, "row": self._digest(max(0, self._next - 1))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the function makes other rows than it did."""
        last = max(0, int(state["next"]) - 1)
        if self._digest(last) != state["row"]:
            raise CheckpointError(
                f"data.function: {self._source.function} makes another row at index {last} than when the checkpoint "
                "was saved; put it back as it was, or start a new run"
            )
        self._next, self._drawn = int(state["next"]), int(state["drawn"])

    def facts(self) -> DataFacts:
        """The number of rows, some of which may turn out to be too long."""
        return DataFacts(num_draws=None if self._source.size == "endless" else self._source.size)

    def _digest(self, index: int) -> str:
        text = json.dumps(self._row(index), sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def metrics(self) -> Mapping[str, float]:
        """Rows that were too long."""
        return {} if self._source.limit is None else {"data/left_out": float(self._next - self._drawn)}


def _load(name: str) -> Callable[..., Any]:
    try:
        return FunctionName.parse(name).load()
    except Exception as error:  # boundary: importing runs users' code
        raise DataError(f"data.function: {name} cannot be loaded: {one_line(error)}") from error
