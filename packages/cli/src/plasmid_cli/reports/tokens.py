"""What single tokens say, for viewers: files of samples hold token ids only."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.utils.printable import printable
from rich.text import Text

from .run_data import RunData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
MAX_SHOWN = 20_000
"""Tokens, or characters, of one text that a terminal is given: half from the beginning, half from the end."""
LONGEST_CHARACTER = 8
"""Tokens after which an incomplete character is given up."""


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
        model = run.config.get("model")
        model = model if isinstance(model, Mapping) else {}
        named = model.get("path") if model.get("tokenizer", "auto") == "auto" else model.get("tokenizer")
        for folder in (run.path / "final", *([Path(named)] if isinstance(named, str) else [])):
            if os.path.isfile(folder / "tokenizer.json"):
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

    def draw(self, token_ids: Sequence[int], style: Callable[[int], str], *, start: int = 0) -> Text:
        """The tokens from ``start`` on, in the style of their position; of very many those in the middle are left out.

        Drawing a million tokens takes a minute, and nobody reads them.
        """
        text = Text()
        surplus = len(token_ids) - start - MAX_SHOWN
        cut = start + MAX_SHOWN // 2 if surplus > 0 else len(token_ids)
        parts = [range(start, cut), range(cut + surplus, len(token_ids))] if surplus > 0 else [range(start, cut)]
        for part in parts:
            if part.start > cut:
                text.append(omission_line(surplus, "tokens"), style="dim")
            before = max(0, part.start - LONGEST_CHARACTER)  # a character may begin there
            tokens = self.split(token_ids[before : part.stop])[part.start - before :]
            for position, token in zip(part, tokens, strict=True):
                text.append(printable(token), style=style(position))
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""


def shorten(text: str) -> str:
    """A text as a terminal may show it; of a very long one the middle is left out."""
    surplus = len(text) - MAX_SHOWN
    if surplus > 0:
        text = text[: MAX_SHOWN // 2] + omission_line(surplus, "characters") + text[-MAX_SHOWN // 2 :]
    return printable(text)


def omission_line(number: int, what: str) -> str:
    """A line in place of what is not shown."""
    return f"\n... {number} {what} are not shown ...\n"
