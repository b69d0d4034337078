"""Convert rows to demonstrations: tokens of the whole text, and a mask of the assistant's tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from plasmid.components import PromptEncoder
from plasmid.components.rollouts import unescape
from plasmid.errors import DataError
from plasmid.types import Ints, Message, Prompt

from .prompt_rows import PromptRows, check_messages, check_size

log = logging.getLogger(__name__)
CHECKED_ROWS = 1000
"""Number of rows that are rendered as a check when the run starts; the others are rendered when drawn."""
MAX_RENDERED_MESSAGES = 500_000
"""Maximum of trained turns times messages in a demonstration: the chat is rendered before and after each turn."""
MAX_RENDERED_CHARACTERS = 200_000_000
"""Maximum of trained turns times characters in a demonstration. A chat at either limit takes about four seconds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is tokenized separately, as prompt and completion are in sampling."""

    text: str
    trained: bool


class DemonstrationRows:
    """All demonstrations of a source, addressed by one index."""

    def __init__(
        self, rows: PromptRows, encode: PromptEncoder, template: Mapping[str, Any], *, train_on: Literal["all", "last"]
    ) -> None:
        self._rows, self._encode, self._template, self._train_on = rows, encode, template, train_on
        self._used = np.arange(len(rows))
        self._cut_at: int | None = None
        self.truncated = 0

    def __len__(self) -> int:
        return len(self._used)

    def digests(self) -> list[list[str]]:
        """Return label and digest of each file, as JSON types."""
        return self._rows.digests()

    @property
    def format(self) -> str:
        """Framework whose row format was detected, or an empty string."""
        return self._rows.format

    @property
    def profiles(self) -> Mapping[str, str]:
        """Empty, because nothing is sampled."""
        return {}

    @property
    def left_out(self) -> int:
        """Number of rows that `limit` dropped."""
        return len(self._rows) - len(self._used)

    def check(self) -> None:
        """Check every row, and render the first ones. Raises `DataError`."""
        self._rows.check()
        for index in range(min(len(self), CHECKED_ROWS)):
            self.prompt(index)

    def limit(self, max_tokens: int, *, too_long: Literal["error", "drop", "truncate"]) -> None:
        """Raise `DataError` for demonstrations with more tokens, drop them, or truncate them."""
        if too_long == "truncate":
            # drop demonstrations whose prompt alone is too long: they would have no trained token
            found = (self.prompt(i) for i in range(len(self)))
            both = np.array([(_first_trained(one) + 1, len(one.token_ids)) for one in found])
            lengths, self._cut_at = both[:, 0], max_tokens
            self.truncated = int(np.count_nonzero((lengths <= max_tokens) & (both[:, 1] > max_tokens)))
        else:
            lengths = np.array([len(self.prompt(i).token_ids) for i in range(len(self))])
        long = np.flatnonzero(lengths > max_tokens)
        if len(long) and too_long == "error":
            raise DataError(
                f"{self.prompt(int(long[0])).id}: the demonstration has {lengths[long[0]]} tokens, more than "
                f"data.max_tokens = {max_tokens} ({len(long)} such rows); raise it, or set data.too_long = "
                '"truncate" to cut them at the end, or "drop"'
            )
        if len(long) == len(self):
            raise DataError(f"data.max_tokens: all {len(self)} demonstrations are longer than {max_tokens} tokens")
        if len(long):
            log.warning("data: dropped %d of %d demonstrations, longer than %d", len(long), len(self), max_tokens)
        self._used = np.flatnonzero(lengths <= max_tokens)

    def prompt(self, index: int) -> Prompt:
        """Return a row as a prompt with `Prompt.trained`. Raises `DataError`."""
        return self._demonstration(self._rows.prompt(int(self._used[index])))

    def find(self, id: str) -> Prompt:
        """Return the demonstration with this id, which must exist."""
        return self._demonstration(self._rows.find(id))

    def _demonstration(self, row: Prompt) -> Prompt:
        try:
            pieces = [piece for piece in self._pieces(row) if piece.text]
            tokens = [self._encode(piece.text, {})[0] for piece in pieces]
        except DataError as error:
            raise DataError(f"{row.id}: {error}") from None
        masks = [np.full(len(ids), piece.trained) for ids, piece in zip(tokens, pieces, strict=True)]
        trained = np.concatenate([np.zeros(0, np.bool_), *masks])
        if not trained.any():
            raise DataError(f"{row.id}: the assistant's text is empty; remove the row")
        if trained[0]:
            raise DataError(f"{row.id}: there is no text before the assistant's; add a prompt")
        none: Ints = np.zeros(0, np.int32)
        text = unescape("".join(piece.text for piece in pieces))
        token_ids = np.concatenate([none, *tokens])[: self._cut_at]
        return replace(row, token_ids=token_ids, text=text, target=None, trained=trained[: self._cut_at])

    def _pieces(self, row: Prompt) -> list[Piece]:
        completion = row.target
        check_size("the completion", completion)
        if isinstance(completion, list) and row.messages:
            return list(self._chat_pieces((*row.messages, *check_messages("the completion", completion))))
        if completion is not None and not isinstance(completion, str):
            raise DataError(f"the completion must be a string, got {completion!r:.40}")
        if not row.messages:
            if completion is None:
                raise DataError("the prompt is plain text without a completion; set data.completion_key")
            return [Piece(row.text, False), Piece(completion, True)]
        messages = row.messages
        if completion is not None:
            messages = (*messages, {"role": "assistant", "content": completion})
        return list(self._chat_pieces(messages))

    def _chat_pieces(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """Split the rendered chat where the assistant's turns start and end.

        A turn starts where the prompt of the preceding messages would end. It ends with its last character that is not
        whitespace: newlines that templates insert between turns belong to the next prompt.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or (self._train_on == "last" and turns[-1] != len(messages) - 1):
            raise DataError('the chat must end with a message of role "assistant" to train on; remove the row')
        learned = turns if self._train_on == "all" else turns[-1:]
        _check_turns(len(learned), messages)
        whole = self._render(messages[: turns[-1] + 1], ends=True)
        done = 0
        for index in learned:
            if index == 0:
                raise DataError("the chat starts with the assistant, without a prompt; remove the row")
            before = self._render(messages[:index], ends=False)
            until = self._render(messages[: index + 1], ends=True)
            if not (until.startswith(before) and whole.startswith(until)):
                raise DataError(self._no_prefix(index))
            written = until[len(before) :].rstrip()
            yield Piece(whole[done : len(before)], False)
            yield Piece(written, True)
            done = len(before) + len(written)

    def _no_prefix(self, index: int) -> str:
        way_out = (
            'set data.train_on = "last"'
            if self._train_on == "all"
            else "use a model.chat_template that only appends, or other template arguments"
        )
        return (
            f"message {index}: the chat template renders the preceding messages differently with this one, so its "
            f"tokens cannot be separated; {way_out}"
        )

    def _render(self, messages: Sequence[Message], *, ends: bool) -> str:
        return self._encode(messages, {**self._template, "add_generation_prompt": not ends}, tokenize=False)[1]


def _first_trained(prompt: Prompt) -> int:
    """Return the index of the first token to train on."""
    assert prompt.trained is not None
    return int(np.argmax(prompt.trained))


def _check_turns(turns: int, messages: Sequence[Message]) -> None:
    """Raise `DataError` for a chat that would take minutes to render."""
    characters = check_size("the chat", list(messages))
    for size, name, limit in (
        (len(messages), "messages", MAX_RENDERED_MESSAGES),
        (characters, "characters", MAX_RENDERED_CHARACTERS),
    ):
        if turns * size > limit:
            raise DataError(
                f"the chat has {turns} turns to train on and {size} {name}, whose product must be at most {limit}; "
                'remove the row, or set data.train_on = "last"'
            )
