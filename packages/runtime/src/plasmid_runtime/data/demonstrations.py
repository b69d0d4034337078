"""Demonstrations from JSONL, JSON, CSV and Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from plasmid.components import PromptEncoder
from plasmid.errors import DataError
from plasmid.settings.trust import INERT
from plasmid.types import Ints, Prompt

from .rows.demonstration_rows import DemonstrationRows
from .rows.prompt_rows import PromptRows, RowReader
from .rows.row_formats import DEMONSTRATIONS
from .settings import Chats, Epochs, Paths, RowSource


class Demonstrations(Epochs, Chats, RowSource, Paths):
    """Demonstrations for supervised fine-tuning: chats, or prompts with completions."""

    limited_by: ClassVar[str] = "max_tokens"
    kind: Literal["demonstrations"] = "demonstrations"
    prompt_key: Annotated[str, INERT] = "messages"
    """Column of the chat (a list of messages), or with completion_key of the prompt (a string or list of messages)."""
    completion_key: Annotated[str, INERT] = "none"
    """Column of the completion, a string or a list of messages; ``none`` if the chat in prompt_key includes it."""
    prompt_as: Literal["text", "chat"] = "chat"
    """Interpretation of a string prompt: ``chat`` wraps it in a user message; ``text`` uses it unchanged, and the
    completion must then include the end-of-text token for the policy to learn it."""
    train_on: Literal["all", "last"] = "all"
    """Assistant messages to train on. Chat templates that drop reasoning from earlier turns need ``last``."""
    max_tokens: Literal["none"] | int = "none"
    """Maximum length of a demonstration, in tokens. If set, all rows are tokenized when the run starts."""
    too_long: Literal["error", "drop", "truncate"] = "error"  # type: ignore[assignment]
    """Treatment of longer demonstrations: ``error``, ``drop`` and count them, or ``truncate`` at the end.
    Demonstrations whose prompt alone is too long are dropped instead of truncated."""

    def holds_demonstrations(self) -> bool:
        return True

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Raise `DataError`: demonstrations include the answers and cannot be an evaluation set."""
        raise DataError('data.kind: "demonstrations" cannot be an evaluation set; use "files"')

    def rows(self, encode: PromptEncoder) -> DemonstrationRows:
        files = self.map_files(self.files())
        found = self.detect_format(files, DEMONSTRATIONS, "prompt_key", "completion_key")
        prompt, completion = (found.prompt, found.target) if found else (self.prompt_key, self.completion_key)
        reader = RowReader(
            prompt_key=prompt,
            target_key=None if completion == "none" else completion,
            chat=self.prompt_as == "chat",
            system=self.system,
        )
        plain = PromptRows(files, reader, _skip_encoding, self.template, format=found.name if found else "")
        rows = DemonstrationRows(plain, encode, self.template, train_on=self.train_on)
        rows.check()
        if self.limit is not None:
            rows.limit(self.limit, too_long=self.too_long)
        return rows


def _skip_encoding(
    prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
) -> tuple[Ints, str]:
    """Skip tokenization, which `DemonstrationRows` does together with the answer."""
    return np.zeros(1, np.int32), prompt if isinstance(prompt, str) else ""
