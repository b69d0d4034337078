"""Prompts from JSONL and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..components import DataSource, PromptEncoder
from ..errors import DataError
from ..types import Prompt
from .prompt_rows import PromptRows, RowReader
from .row_files import FileSlice
from .stream import RowStream


class Files(DataSource):
    """Rows of JSONL and Parquet files."""

    kind: Literal["files"] = "files"
    path: str | tuple[str, ...]
    """File or files, ``.jsonl`` or ``.parquet``; ``file.jsonl@[0:100]`` takes a slice of the rows, as Python would."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages. ``a.b`` reaches into an object."""
    target_key: str = "target"
    """Column of the ground truth that rewards get; ``none`` if the rows have none."""
    prompt_as: Literal["text", "chat"] = "text"
    """What a prompt that is a string becomes: ``text`` as it is, or the user's message of a ``chat``."""
    system: str = ""
    """System message of chats that do not begin with one; empty for none."""
    template: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template: ``template.enable_thinking = false``."""
    shuffle: bool = True
    """Deal the rows anew in every epoch, as the run's seed says. Evaluation sets keep the order of the file."""
    epochs: Literal["endless"] | int = "endless"
    """How often each row comes before the data end. Evaluation sets are read once."""
    max_prompt_tokens: Literal["none"] | int = "none"
    """Longest prompt in tokens. Setting it tokenises all rows when the run starts."""
    too_long: Literal["error", "drop"] = "error"
    """What to do about prompts longer than `max_prompt_tokens`: an error before the run starts, or leave them out."""

    @field_validator("path")
    @classmethod
    def _slices_parse(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value:
            raise ValueError("name at least one file")
        for text in (value,) if isinstance(value, str) else value:
            FileSlice.parse(text)
        return value

    @model_validator(mode="after")
    def _limits_make_sense(self) -> Self:
        for name in ("epochs", "max_prompt_tokens"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be {type(self).model_fields[name].default!r} or at least 1, got {value}")
        if self.max_prompt_tokens == "none" and self.too_long != "error":
            raise ValueError(f"too_long = {self.too_long!r} has no effect without max_prompt_tokens")
        return self

    def stream(self, encode: PromptEncoder, *, seed: int) -> RowStream:
        """Read and check every row; they are tokenised when they are drawn."""
        epochs = None if self.epochs == "endless" else self.epochs
        return RowStream(self._rows(encode), epochs=epochs, seed=seed if self.shuffle else None)

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Every row once, in the order of the files."""
        if self.epochs not in ("endless", 1):
            raise DataError(f"data.epochs: an evaluation set is read once, got {self.epochs}; remove the setting")
        rows = self._rows(encode)
        return (rows.prompt(index) for index in range(len(rows)))

    def _rows(self, encode: PromptEncoder) -> PromptRows:
        paths = (self.path,) if isinstance(self.path, str) else self.path
        reader = RowReader(
            prompt_key=self.prompt_key,
            target_key=None if self.target_key == "none" else self.target_key,
            chat=self.prompt_as == "chat",
            system=self.system,
        )
        rows = PromptRows([FileSlice.parse(text) for text in paths], reader, encode, self.template)
        rows.check()
        if isinstance(self.max_prompt_tokens, int):
            rows.limit(self.max_prompt_tokens, drop=self.too_long == "drop")
        return rows
