"""Demonstrations from JSONL and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from ..components import DataSource, PromptEncoder
from ..errors import DataError
from ..types import Ints, Prompt
from .demonstration_rows import DemonstrationRows
from .prompt_rows import PromptRows, RowReader
from .row_files import FileSlice
from .stream import RowStream


class Demonstrations(DataSource):
    """Chats, or prompts with their completions, that the policy learns to write."""

    demonstrations: ClassVar[bool] = True
    kind: Literal["demonstrations"] = "demonstrations"
    path: str | tuple[str, ...]
    """File or files, ``.jsonl`` or ``.parquet``; ``file.jsonl@[0:100]`` takes a slice of the rows, as Python would."""
    prompt_key: str = "messages"
    """Column of the chat, a list of messages; or with completion_key, of the prompt: a string or a list of messages."""
    completion_key: str = "none"
    """Column of what the policy is to write after the prompt; ``none`` if it stands in the chat."""
    prompt_as: Literal["text", "chat"] = "chat"
    """What a prompt that is a string becomes: ``text`` as it is (the completion then has to spell out the end of text
    if the policy is to learn it), or the user's message of a ``chat``."""
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's messages are learned; templates that drop reasoning from earlier turns need last."""
    system: str = ""
    """System message of chats that do not begin with one; empty for none."""
    template: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template: ``template.enable_thinking = false``."""
    shuffle: bool = True
    """Deal the rows anew in every epoch, as the run's seed says."""
    epochs: Literal["endless"] | int = "endless"
    """How often each row comes before the data end."""
    max_tokens: Literal["none"] | int = "none"
    """Longest demonstration in tokens. Setting it tokenises all rows when the run starts."""
    too_long: Literal["error", "drop"] = "error"
    """What to do about longer ones: an error before the run starts, or leave them out."""

    @field_validator("path")
    @classmethod
    def _slices_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("name at least one file")
        for text in (value,) if isinstance(value, str) else value:
            FileSlice.parse(text)
        return value

    @model_validator(mode="after")
    def _settings_make_sense(self) -> Self:
        for name in ("epochs", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be {type(self).model_fields[name].default!r} or at least 1, got {value}")
        if self.max_tokens == "none" and self.too_long != "error":
            raise ValueError(f"too_long = {self.too_long!r} has no effect without max_tokens")
        return self

    def stream(self, encode: PromptEncoder, *, seed: int) -> RowStream:
        """Read and check every row; they are tokenised when they are drawn."""
        epochs = None if self.epochs == "endless" else self.epochs
        return RowStream(self._rows(encode), epochs=epochs, seed=seed if self.shuffle else None)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Demonstrations cannot be evaluated on: they hold the answers."""
        raise DataError('data.kind: "demonstrations" are no evaluation set; use "files"')

    def _rows(self, encode: PromptEncoder) -> DemonstrationRows:
        paths = (self.path,) if isinstance(self.path, str) else self.path
        reader = RowReader(
            prompt_key=self.prompt_key,
            target_key=None if self.completion_key == "none" else self.completion_key,
            chat=self.prompt_as == "chat",
            system=self.system,
        )
        plain = PromptRows([FileSlice.parse(text) for text in paths], reader, _as_it_is, self.template)
        rows = DemonstrationRows(plain, encode, self.template, train_on=self.train_on)
        rows.check()
        if isinstance(self.max_tokens, int):
            rows.limit(self.max_tokens, drop=self.too_long == "drop")
        return rows


def _as_it_is(prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> tuple[Ints, str]:
    """Leaves the text to `DemonstrationRows`, which tokenises it together with the answer."""
    return np.zeros(1, np.int32), prompt if isinstance(prompt, str) else ""
