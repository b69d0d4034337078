"""Demonstrations from JSONL and Parquet files."""

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
from .settings import Chats, Epochs, Paths


class Demonstrations(Epochs, Chats, Paths):
    """Chats, or prompts with their completions, that the policy learns to write."""

    limited_by: ClassVar[str] = "max_tokens"
    kind: Literal["demonstrations"] = "demonstrations"
    prompt_key: Annotated[str, INERT] = "messages"
    """Column of the chat, a list of messages; or with completion_key, of the prompt: a string or a list of messages."""
    completion_key: Annotated[str, INERT] = "none"
    """Column of what the policy is to write after the prompt; ``none`` if it stands in the chat."""
    prompt_as: Literal["text", "chat"] = "chat"
    """What a prompt that is a string becomes: ``text`` as it is (the completion then has to spell out the end of text
    if the policy is to learn it), or the user's message of a ``chat``."""
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's messages are learned; templates that drop reasoning from earlier turns need last."""
    max_tokens: Literal["none"] | int = "none"
    """Longest demonstration in tokens. Setting it tokenises all rows when the run starts."""

    def holds_demonstrations(self) -> bool:
        return True

    def prompts(self, encode: PromptEncoder) -> Iterator[Prompt]:
        """Demonstrations cannot be evaluated on: they hold the answers."""
        raise DataError('data.kind: "demonstrations" are no evaluation set; use "files"')

    def rows(self, encode: PromptEncoder) -> DemonstrationRows:
        reader = RowReader(
            prompt_key=self.prompt_key,
            target_key=None if self.completion_key == "none" else self.completion_key,
            chat=self.prompt_as == "chat",
            system=self.system,
        )
        plain = PromptRows(self.files(), reader, _as_it_is, self.template)
        rows = DemonstrationRows(plain, encode, self.template, train_on=self.train_on)
        rows.check()
        if self.limit is not None:
            rows.limit(self.limit, drop=self.too_long == "drop")
        return rows


def _as_it_is(
    prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
) -> tuple[Ints, str]:
    """Leaves the text to `DemonstrationRows`, which tokenises it together with the answer."""
    return np.zeros(1, np.int32), prompt if isinstance(prompt, str) else ""
