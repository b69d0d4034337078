"""Convert rows to prompts: columns, checks, and tokenization."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from plasmid.components import PromptEncoder
from plasmid.errors import DataError
from plasmid.types import Message, Prompt

from .json_lines import type_name
from .row_files import RowFile

log = logging.getLogger(__name__)
MAX_MESSAGES = 10_000
"""Maximum number of messages of a prompt. Longer chats take seconds to tokenize, which blocks other draws."""
MAX_CHARACTERS = 4_000_000
"""Maximum number of characters of a prompt, about a million tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A checked row."""

    prompt: str | tuple[Message, ...]
    target: Any
    metadata: Mapping[str, Any]
    profile: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowReader:
    """Reads prompt, target and profile from the columns of a row."""

    prompt_key: str
    target_key: str | None
    chat: bool
    """True to wrap strings in a user message."""
    system: str
    profile_key: str | None = None
    last_answer: Literal["error", "drop", "keep"] = "keep"
    """Treatment of chats that end with an assistant message."""

    def read(self, where: str, row: Mapping[str, Any]) -> Row:
        """Check a row. Raises a `DataError` that starts with ``where``."""
        prompt = self._prompt(where, _get(where, row, self.prompt_key, "prompt_key", ""))
        target = None
        if self.target_key is not None:
            hint = ' ("none" if the rows have none)'
            target = _get(where, row, self.target_key, "target_key", hint)
            if target is None:
                raise DataError(f"{where}: {self.target_key!r} is null; remove the row, or set data.target_key{hint}")
            for number in target if isinstance(target, list) else [target]:
                if isinstance(number, float) and not math.isfinite(number):
                    raise DataError(
                        f"{where}: {self.target_key!r} must not contain {number}, which no answer equals; write a "
                        "finite number or a string, or remove the row"
                    )
        used = {key if key in row else key.split(".")[0] for key in (self.prompt_key, self.target_key) if key}
        metadata = {k: v for k, v in row.items() if k not in used}
        return Row(prompt=prompt, target=target, metadata=metadata, profile=self._profile(where, row))

    def _profile(self, where: str, row: Mapping[str, Any]) -> str:
        if self.profile_key is None:
            return ""
        value = _get(where, row, self.profile_key, "profile_key", ' ("none" if no row names a profile)')
        if not isinstance(value, str | None):
            raise DataError(f"{where}: {self.profile_key!r} must be the name of a profile, got {type_name(value)}")
        return value or ""

    def _prompt(self, where: str, value: object) -> str | tuple[Message, ...]:
        at = f"{where}: {self.prompt_key!r}"
        check_size(at, value)
        if isinstance(value, str):
            _check_text(at, value)
            if not self.chat:
                return value
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list):
            raise DataError(f"{at} must be a string or a list of messages, got {type_name(value)}")
        if not value:
            raise DataError(f"{at} is a chat without messages; remove the row")
        messages = check_messages(at, value)
        if messages[-1]["role"] == "assistant" and self.last_answer != "keep":
            messages = self._without_answer(at, messages)
        if self.system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system})
        return tuple(messages)

    def _without_answer(self, at: str, messages: list[Message]) -> list[Message]:
        """Remove the assistant's messages at the end of a chat. Raises `DataError`."""
        if self.last_answer == "error":
            raise DataError(
                f"{at} ends with the assistant's answer, so there is nothing to sample; set data.last_answer = "
                '"drop" to remove the answer, or train on it: data.kind = "demonstrations", algorithm.kind = "sft"'
            )
        count = len(messages)
        while count and messages[count - 1]["role"] == "assistant":
            count -= 1
        if not count:
            raise DataError(f"{at} has only messages of the assistant; remove the row")
        return messages[:count]


def _get(where: str, row: Mapping[str, Any], key: str, setting: str, hint: str) -> Any:
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = ", ".join(row) or "nothing"
            raise DataError(f"{where}: no key {key!r}; the row has: {has}; set data.{setting}{hint}")
        value = value[part]
    return value


def check_count(at: str, items: list[Any], name: str) -> None:
    """Raise a `DataError` that starts with ``at`` for more items than `MAX_MESSAGES`."""
    if len(items) > MAX_MESSAGES:
        raise DataError(f"{at} has {len(items)} {name}, more than the limit of {MAX_MESSAGES}; remove the row")


def check_size(at: str, value: object) -> int:
    """Count the characters of a text or of messages. Raises `DataError` if they would take too long to process."""
    if isinstance(value, list):
        check_count(at, value, "messages")
    left, characters = [value], 0
    while left:  # no recursion: rows may be nested deeply
        item = left.pop()
        characters += len(item) if isinstance(item, str | Mapping | list) else 1
        left.extend((*item, *item.values()) if isinstance(item, Mapping) else item if isinstance(item, list) else ())
        if characters > MAX_CHARACTERS:
            raise DataError(f"{at} has more than {MAX_CHARACTERS} characters; remove the row")
    return characters


def check_chat_settings(reader: RowReader, template: Mapping[str, Any]) -> None:
    """Raise `DataError` if settings for chats are given although no prompt is a chat."""
    if reader.system or template:
        name = "system" if reader.system else "template"
        raise DataError(
            f'data.{name}: has no effect, since no prompt is a chat; set data.prompt_as = "chat" or remove it'
        )
    if reader.last_answer == "drop":
        raise DataError('data.last_answer: "drop" has no effect, since no prompt is a chat; remove it')


def check_messages(at: str, values: list[Any]) -> list[Message]:
    """Check the messages of a chat. Raises a `DataError` that starts with ``at``."""
    return [_message(f"{at}.{i}", message) for i, message in enumerate(values)]


def _check_text(at: str, text: str) -> None:
    if not text:
        raise DataError(f"{at} is empty; remove the row")
    check_encodable(at, text)


def check_encodable(at: str, text: str) -> None:
    """Raise a `DataError` that starts with ``at`` for text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{at} has half a surrogate pair at character {error.start + 1}, which cannot be tokenized"
        ) from None


def _message(at: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{at} must be a message with role and content, got {type_name(message)}")
    # In a Parquet file every message has every key; null means that the key is absent.
    message = {key: value for key, value in message.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise DataError(f"{at} is a message without a role; it has: {', '.join(message) or 'nothing'}")
    if not isinstance(message.get("content"), str):
        if "content" not in message and "tool_calls" in message:
            return message
        content = message.get("content")
        why = "; prompts are text without images" if isinstance(content, list) else ""
        raise DataError(f"{at}.content must be a string, got {type_name(content)}{why}")
    if message["content"]:
        _check_text(f"{at}.content", message["content"])
    return message


class PromptRows:
    """All rows of a data source, with one index over all files."""

    truncated = 0
    """Prompts are dropped or refused, never cut."""

    def __init__(
        self,
        files: Sequence[RowFile],
        reader: RowReader,
        encode: PromptEncoder,
        template: Mapping[str, Any],
        *,
        format: str = "",
    ) -> None:
        """``format`` names the framework whose row format was detected."""
        self.format = format
        self._files, self._reader, self._encode, self._template = files, reader, encode, template
        self._ends = list(accumulate(len(file) for file in files))
        self._labels = _labels(files)
        self._used = np.arange(self._ends[-1])
        self.profiles: dict[str, str] = {}
        """Profiles that rows select, each with the location of the first such row; complete after `check`."""

    def __len__(self) -> int:
        return len(self._used)

    def digests(self) -> list[list[str]]:
        """Return label and digest of each file, as JSON types."""
        return [[label, file.digest] for label, file in zip(self._labels, self._files, strict=True)]

    @property
    def left_out(self) -> int:
        """Number of rows that `limit` dropped."""
        return self._ends[-1] - len(self._used)

    def check(self) -> None:
        """Check every row, and tokenize the first text and the first chat. Raises `DataError`."""
        first: dict[bool, int] = {}
        index = 0
        for file in self._files:
            for i, values in enumerate(file):
                where = f"{file.path}:{file.number(i)}"
                row = self._reader.read(where, values)
                first.setdefault(not isinstance(row.prompt, str), index)
                if row.profile:
                    self.profiles.setdefault(row.profile, where)
                index += 1
        if True not in first:
            check_chat_settings(self._reader, self._template)
        for index in first.values():
            self.prompt(index)

    def limit(self, max_tokens: int, *, drop: bool) -> None:
        """Raise `DataError` for prompts with more tokens, or drop them."""
        lengths = np.array([len(self.prompt(i).token_ids) for i in range(len(self))])
        long = np.flatnonzero(lengths > max_tokens)
        if not len(long):
            return
        if not drop:
            others = f" (and {len(long) - 1} more)" if len(long) > 1 else ""
            raise DataError(
                f"{self._locate(int(long[0]))[1]}: the prompt has {lengths[long[0]]} tokens, more than "
                f'data.max_prompt_tokens = {max_tokens}{others}; raise it, or set data.too_long = "drop"'
            )
        if len(long) == len(self):
            raise DataError(f"data.max_prompt_tokens: all {len(self)} prompts are longer than {max_tokens} tokens")
        log.warning("data: dropped %d of %d prompts with more than %d tokens", len(long), len(self), max_tokens)
        self._used = np.flatnonzero(lengths <= max_tokens)

    def _locate(self, index: int) -> tuple[int, str, int]:
        """Return the number of the file, the row's location for messages, and its index in the file."""
        at = int(self._used[index])
        number = bisect_right(self._ends, at)
        local = at - (self._ends[number - 1] if number else 0)
        return number, f"{self._files[number].path}:{self._files[number].number(local)}", local

    def prompt(self, index: int) -> Prompt:
        """Return a row as a prompt. Raises `DataError`."""
        return self._prompt(*self._locate(index))

    def find(self, id: str) -> Prompt:
        """Return the prompt with this id, which must exist."""
        label, _, line = id.rpartition(":")
        number = self._labels.index(label)
        file = self._files[number]
        return self._prompt(number, f"{file.path}:{line}", file.index(int(line)))

    def _prompt(self, number: int, where: str, local: int) -> Prompt:
        file = self._files[number]
        row = self._reader.read(where, file.row(local))
        return tokenize_row(f"{self._labels[number]}:{file.number(local)}", where, row, self._encode, self._template)


def tokenize_row(id: str, where: str, row: Row, encode: PromptEncoder, template: Mapping[str, Any]) -> Prompt:
    """Tokenize a checked row; ``template`` applies to chats. Raises a `DataError` that starts with ``where``."""
    messages = () if isinstance(row.prompt, str) else row.prompt
    try:
        token_ids, text = encode(row.prompt, template if messages else {})
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if not len(token_ids):
        raise DataError(f"{where}: the tokenizer returns no tokens for the prompt")
    return Prompt(
        id=id,
        token_ids=token_ids,
        text=text,
        messages=messages,
        template=template if messages else {},
        target=row.target,
        metadata=row.metadata,
        profile=row.profile,
    )


def _labels(files: Sequence[RowFile]) -> list[str]:
    """Return unique labels: the file name, then ``name#2`` for the second file of that name, and so on."""
    names = [file.path.name for file in files]
    counts = [names[:i].count(name) + 1 for i, name in enumerate(names)]
    return [name if count == 1 else f"{name}#{count}" for name, count in zip(names, counts, strict=True)]
