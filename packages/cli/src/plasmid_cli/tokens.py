"""What single tokens say, for viewers: files of samples hold token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .run_data import RunData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 8
"""Tokens after which an incomplete character is given up."""


def printable(text: str) -> str:
    """The text with control characters made visible: a policy must not be able to command the reader's terminal."""
    return "".join(c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else f"\\x{ord(c):02x}" for c in text)


class TokenTexts:
    """Splits token ids into texts with the run's tokenizer, or into ids where it is not at hand."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    def known(self) -> bool:
        """False where there is no tokenizer."""
        return self._tokenizer is not None

    @staticmethod
    def of(run: RunData) -> TokenTexts:
        """With the tokenizer of the final policy, or else that of the model that the run started from."""
        model = run.config.get("model") or {}
        named = model.get("path") if model.get("tokenizer", "auto") == "auto" else model.get("tokenizer")
        for folder in (run.path / "final", *([Path(named)] if named else [])):
            if (folder / "tokenizer.json").exists():
                from tokenizers import Tokenizer

                return TokenTexts(Tokenizer.from_file(str(folder / "tokenizer.json")))
        return TokenTexts(None)

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token. A character made of several tokens belongs to its last one."""
        ids = [int(id_) for id_ in token_ids]
        if self._tokenizer is None:
            return [f"[{id_}]" for id_ in ids]
        texts, start = [], 0
        for end in range(1, len(ids) + 1):
            # with the token before it, because many decoders drop the first token's leading space
            before = self._decode(ids[max(0, start - 1) : start])
            text = self._decode(ids[max(0, start - 1) : end])[len(before) :]
            complete = not text.endswith(REPLACEMENT) or end - start >= LONGEST_CHARACTER or end == len(ids)
            texts.append(text if complete else "")
            start = end if complete else start
        return texts

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""
