"""Detection and checks of tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plasmid.errors import ModelError
from plasmid.utils.printable import escape_unprintable
from plasmid.utils.safe_files import check_entries

FAST = "tokenizer.json"
FILES = (FAST, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
"""Files of which one is enough for a folder to have a tokenizer."""
MAX_ID_RATIO, EXTRA_IDS = 2, 1 << 20
"""Limit of token ids: MAX_ID_RATIO x number of tokens + EXTRA_IDS, because the ids of some vocabularies have gaps."""


def has_tokenizer(folder: Path) -> bool:
    """Check whether the folder has a file of a tokenizer."""
    return any((folder / name).is_file() for name in FILES)


def check_tokenizer_files(folder: Path) -> None:
    """Raise `ModelError` for tokenizer files that would print control characters, allocate gigabytes or block."""
    try:
        check_entries(folder)
    except OSError as error:
        raise ModelError(f"model.path: {error.filename}: {error.strerror}; remove it") from error
    tokenizer, *others = (_read(folder / name) for name in (FAST, "tokenizer_config.json", "special_tokens_map.json"))
    added = tokenizer.get("added_tokens")
    for name in _names([added, *others]):  # the tokenizers library prints the names of unknown settings
        if escape_unprintable(name) != name:
            shown = escape_unprintable(name)[:100]
            raise ModelError(
                f'model.path: the tokenizer in {folder} has a setting with control characters, "{shown}"; remove it'
            )
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [one.get("id") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    numbers = [id_ for id_ in ids if isinstance(id_, int | float)]
    most = MAX_ID_RATIO * len(numbers) + EXTRA_IDS
    if numbers and max(numbers) >= most:  # tables have a row for each id up to the maximum
        raise ModelError(f"model.path: {folder / FAST} has {len(numbers)} tokens, but a token id of {most} or more")


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if it cannot be read, because loading the tokenizer reports the error."""
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _names(data: Any) -> Iterator[str]:
    """Yield the keys of all objects in JSON data."""
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
