"""From rows to demonstrations: the whole text in tokens, and which of them the assistant wrote."""

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

from .prompt_rows import PromptRows, check_size

log = logging.getLogger(__name__)
CHECKED_ROWS = 1000
"""Rows that are rendered when the run starts; the others are when they are drawn."""
MAX_RENDERED_MESSAGES = 500_000
"""Turns to learn times messages of a demonstration: the template renders the chat before and after each turn."""
MAX_RENDERED_CHARACTERS = 200_000_000
"""Turns to learn times characters of a demonstration. A chat at either bound takes about four seconds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text that is tokenised by itself, as the engine gets a prompt and answers with tokens of its own."""

    text: str
    trained: bool


class DemonstrationRows:
    """All demonstrations of a source, addressed by one index."""

    def __init__(
        self, rows: PromptRows, encode: PromptEncoder, template: Mapping[str, Any], *, train_on: Literal["all", "last"]
    ) -> None:
        self._rows, self._encode, self._template, self._train_on = rows, encode, template, train_on
        self._used = np.arange(len(rows))

    def __len__(self) -> int:
        return len(self._used)

    def digests(self) -> list[list[str]]:
        """Label and digest of each file, as JSON keeps them."""
        return self._rows.digests()

    @property
    def profiles(self) -> Mapping[str, str]:
        """None: nothing is sampled."""
        return {}

    @property
    def left_out(self) -> int:
        """Rows that `limit` has left out."""
        return len(self._rows) - len(self._used)

    def check(self) -> None:
        """Check every row, and render the first ones. Raises `DataError`."""
        self._rows.check()
        for index in range(min(len(self), CHECKED_ROWS)):
            self.prompt(index)

    def limit(self, max_tokens: int, *, drop: bool) -> None:
        """Find demonstrations of more tokens: raise `DataError`, or leave them out."""
        lengths = np.array([len(self.prompt(i).token_ids) for i in range(len(self))])
        long = np.flatnonzero(lengths > max_tokens)
        if len(long) and not drop:
            raise DataError(
                f"{self.prompt(int(long[0])).id}: the demonstration has {lengths[long[0]]} tokens, data.max_tokens is "
                f'{max_tokens} ({len(long)} such rows); raise it, or set data.too_long = "drop"'
            )
        if len(long) == len(self):
            raise DataError(f"data.max_tokens: all {len(self)} demonstrations are longer than {max_tokens} tokens")
        if len(long):
            log.warning("data: left out %d of %d demonstrations, longer than %d", len(long), len(self), max_tokens)
        self._used = np.flatnonzero(lengths <= max_tokens)

    def prompt(self, index: int) -> Prompt:
        """One row; its `Prompt.trained` is set. Raises `DataError`."""
        return self._demonstration(self._rows.prompt(int(self._used[index])))

    def find(self, id: str) -> Prompt:
        """The demonstration of an id, which must be that of a row."""
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
            raise DataError(f"{row.id}: the assistant writes nothing; leave the row out")
        if trained[0]:
            raise DataError(f"{row.id}: nothing stands before what the assistant writes; give it a prompt")
        none: Ints = np.zeros(0, np.int32)
        text = unescape("".join(piece.text for piece in pieces))
        return replace(row, token_ids=np.concatenate([none, *tokens]), text=text, target=None, trained=trained)

    def _pieces(self, row: Prompt) -> list[Piece]:
        completion = row.target
        if completion is not None and not isinstance(completion, str):
            raise DataError(f"the completion must be a string, got {completion!r:.40}")
        check_size("the completion", completion)
        if not row.messages:
            if completion is None:
                raise DataError("the prompt is plain text, and there is no completion; set data.completion_key")
            return [Piece(row.text, False), Piece(completion, True)]
        messages = row.messages
        if completion is not None:
            messages = (*messages, {"role": "assistant", "content": completion})
        return list(self._chat_pieces(messages))

    def _chat_pieces(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """What the template renders, cut where the assistant's turns begin and end.

        A turn begins where a prompt of the messages before it would end, and it ends with the last character that is no
        white space: newlines that templates put between turns are the next prompt's.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns or (self._train_on == "last" and turns[-1] != len(messages) - 1):
            raise DataError('the chat has no message of the role "assistant" to learn from at its end; leave it out')
        learned = turns if self._train_on == "all" else turns[-1:]
        _check_turns(len(learned), messages)
        whole = self._render(messages[: turns[-1] + 1], ends=True)
        done = 0
        for index in learned:
            if index == 0:
                raise DataError("the chat begins with the assistant, so nothing asks for what it writes; leave it out")
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
            f"message {index}: the chat template renders the messages before it otherwise once it is there, so its "
            f"tokens cannot be told apart; {way_out}"
        )

    def _render(self, messages: Sequence[Message], *, ends: bool) -> str:
        return self._encode(messages, {**self._template, "add_generation_prompt": not ends}, tokenize=False)[1]


def _check_turns(turns: int, messages: Sequence[Message]) -> None:
    """Refuse a chat that would be rendered so often that it takes minutes. Raises `DataError`."""
    characters = check_size("the chat", list(messages))
    for size, name, limit in (
        (len(messages), "messages", MAX_RENDERED_MESSAGES),
        (characters, "characters", MAX_RENDERED_CHARACTERS),
    ):
        if turns * size > limit:
            raise DataError(
                f"the chat has {turns} turns to learn and {size} {name}, whose product must be at most {limit}; "
                'leave the row out, or set data.train_on = "last"'
            )
