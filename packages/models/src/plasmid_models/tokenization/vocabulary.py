"""Whether two models mean the same by a token id, from their folders, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plasmid.errors import ModelError
from plasmid.utils.json_text import read_json

from ..folder import read_config


def check_vocabulary(where: str, path: Path, *, policy: Path, tokenizer: Path) -> None:
    """Raises `ModelError` unless the model in ``path`` knows every token of the policy under the policy's id.

    It may know more, and its table may be padded further. ``tokenizer`` is the folder of the policy's tokenizer.
    """
    ours, theirs = _size("model", policy), _size(where, path)
    if theirs < ours:
        raise ModelError(
            f"{where}.path: {path} has a vocabulary of {theirs} tokens, the policy one of {ours}; "
            "the two must have the same tokens"
        )
    known = _tokens(where, path)
    for token, id_ in (_tokens("model", tokenizer) if known else {}).items():
        if known.get(token) != id_:
            other = f"is {known[token]}" if token in known else "is no token"
            raise ModelError(
                f"{where}.path: {path} has another vocabulary than the policy: {token!r} {other} there and {id_} here"
            )


def _size(where: str, path: Path) -> int:
    config = read_config(where, path)
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"{where}.path: {path / 'config.json'} has no vocab_size")
    return size


def _tokens(where: str, path: Path) -> dict[str, int]:
    """Ids by token; empty without a ``tokenizer.json`` whose vocabulary is a table."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        content: Any = read_json(file)
        vocabulary = content["model"]["vocab"]
        if not isinstance(vocabulary, Mapping):
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        return dict(vocabulary) | {added["content"]: added["id"] for added in content.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where}.path: {file} cannot be read: {error}") from None
