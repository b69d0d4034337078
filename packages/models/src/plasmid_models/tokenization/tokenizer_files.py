"""The files by which a folder is known to hold a tokenizer."""

from __future__ import annotations

from pathlib import Path

FAST = "tokenizer.json"
FILES = (FAST, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
"""Files each of which makes a folder a tokenizer."""


def has_tokenizer(folder: Path) -> bool:
    """Check whether the folder has a file of a tokenizer."""
    return any((folder / name).is_file() for name in FILES)
