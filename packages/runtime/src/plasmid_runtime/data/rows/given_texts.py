"""Existing prompts and responses for rewards to score, from rows of files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from plasmid.errors import DataError
from plasmid.types import Ints, Prompt, PromptGroup, Sample, SamplingParams, StopReason, VersionSpan

from .file_slices import FileSlice
from .json_lines import type_name
from .prompt_rows import check_count, check_encodable, check_size
from .row_files import open_rows

Encode = Callable[[str], Ints]
"""Converts text to tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Names of the columns; ``a.b`` addresses a field of an object."""

    prompt: str = "prompt"
    response: str = "response"
    target: str = "target"


def read_responses(path: str, keys: Keys, encode: Encode) -> list[PromptGroup]:
    """Read one group per row. A response is a string, or a list of strings for several samples of the prompt.

    The prompt of a row without one is empty, and its target None. Raises `DataError`.
    """
    part = FileSlice.parse(path)
    rows = open_rows(part)
    found = enumerate(rows)
    return [_group(index, f"{part.path}:{rows.number(index)}", row, keys, encode) for index, row in found]


def _group(index: int, where: str, row: Mapping[str, Any], keys: Keys, encode: Encode) -> PromptGroup:
    given = _get(row, keys.response)
    if given is None:
        has = ", ".join(row) or "nothing"
        raise DataError(f"{where}: no response under {keys.response!r}; the row has: {has}; set --response-key")
    texts = given if isinstance(given, list) else [given]
    check_count(f"{where}: {keys.response!r}", texts, "texts")
    for text in texts:
        check_size(f"{where}: {keys.response!r}", text)
        if not isinstance(text, str):
            raise DataError(f"{where}: {keys.response!r} must be a string or a list of strings, got {type_name(text)}")
        check_encodable(f"{where}: {keys.response!r}", text)
    asked = _get(row, keys.prompt)
    check_size(f"{where}: {keys.prompt!r}", asked)
    messages = tuple(asked) if isinstance(asked, list) else ()
    text = "\n".join(_message_text(message) for message in messages) if messages else str(asked or "")
    check_encodable(f"{where}: {keys.prompt!r}", text)
    used = {key.split(".")[0] for key in (keys.prompt, keys.response, keys.target)}
    prompt = Prompt(
        id=Path(where).name,
        token_ids=encode(text),
        text=text,
        messages=messages,
        target=_get(row, keys.target),
        metadata={name: value for name, value in row.items() if name not in used},
    )
    samples = [_sample(index, number, prompt, text, encode) for number, text in enumerate(texts)]
    return PromptGroup(id=index, prompt=prompt, samples=samples)


def _message_text(message: object) -> str:
    return str(message.get("content", "")) if isinstance(message, Mapping) else str(message)


def _sample(index: int, number: int, prompt: Prompt, text: str, encode: Encode) -> Sample:
    drawn = encode(text)
    tokens = np.concatenate([prompt.token_ids, drawn])
    generated = np.arange(len(tokens)) >= len(prompt.token_ids)
    return Sample(
        id=f"{prompt.id}/{number}",
        rollout_id=f"{prompt.id}/{number}",
        group_id=index,
        prompt_id=prompt.id,
        token_ids=tokens.astype(np.int32),
        loss_mask=generated,
        rollout_logprobs=np.zeros(len(tokens), np.float32),
        versions=_span(len(prompt.token_ids), len(tokens)),
        sampling=SamplingParams(),
        text=text,
        stop_reason=StopReason.STOP,
    )


def _span(start: int, end: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(version=0, start=start, end=end),) if end > start else ()


def _get(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of the key, or None. Less strict than `RowReader`, which reads training data."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
