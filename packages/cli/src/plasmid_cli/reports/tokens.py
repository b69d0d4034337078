"""Convert single tokens to text for viewers, since sample files only contain token ids."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.errors import one_line
from plasmid.utils.printable import escape_unprintable
from rich.text import Text

from .run_data import RunData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)
REPLACEMENT = "\ufffd"
MAX_SHOWN = 20_000
"""Maximum tokens or characters of a text to print; longer texts show the first and last half of that."""
MAX_REMEMBERED = 1_000_000
"""Maximum number of cached texts of token pairs; decoding takes most of the time of a report."""
MAX_CHARACTER_TOKENS = 8
"""Maximum number of tokens of a character; longer sequences are treated as invalid."""


def load_tokenizer(*folders: Path | str) -> Tokenizer | None:
    """Load the tokenizer of the first folder that has a readable one."""
    for folder in folders:
        if os.path.isfile(file := Path(folder) / "tokenizer.json"):
            from plasmid_models.tokenization.tokenizer_files import check_tokenizer_files
            from tokenizers import Tokenizer

            try:
                check_tokenizer_files(file.parent)
                return Tokenizer.from_file(str(file))
            except Exception as error:  # noqa: BLE001  boundary: broken files make it raise anything
                log.warning("%s cannot be read: %.300s", escape_unprintable(str(file)), one_line(error))
    return None


class TokenTexts:
    """Splits token ids into texts with the run's tokenizer, or into ids if it is not available."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoded: dict[tuple[int, ...], str] = {}

    @property
    def has_tokenizer(self) -> bool:
        """True if a tokenizer is available."""
        return self._tokenizer is not None

    @staticmethod
    def of(run: RunData) -> TokenTexts:
        """Use the tokenizer of the final policy, or otherwise that of the initial model."""
        model = run.config.get("model")
        model = model if isinstance(model, Mapping) else {}
        named = model.get("path") if model.get("tokenizer", "auto") == "auto" else model.get("tokenizer")
        return TokenTexts(load_tokenizer(run.path / "final", *([Path(named)] if isinstance(named, str) else [])))

    def split(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token. A character of several tokens belongs to the last one."""
        ids = [int(id_) for id_ in token_ids]
        if self._tokenizer is None:
            return [f"[{id_}]" for id_ in ids]
        texts, start = [], 0
        for end in range(1, len(ids) + 1):
            # decode with the preceding token, because many decoders drop the first token's leading space
            before = self._decode(ids[max(0, start - 1) : start])
            text = self._decode(ids[max(0, start - 1) : end])[len(before) :]
            complete = not text.endswith(REPLACEMENT) or end - start >= MAX_CHARACTER_TOKENS or end == len(ids)
            texts.append(text if complete else "")
            start = end if complete else start
        return texts

    def draw(self, token_ids: Sequence[int], style: Callable[[int], str], *, start: int = 0) -> Text:
        """Return the tokens from ``start`` on, styled by position. Omits the middle of very long sequences."""
        text = Text()
        surplus = len(token_ids) - start - MAX_SHOWN
        cut = start + MAX_SHOWN // 2 if surplus > 0 else len(token_ids)
        parts = [range(start, cut), range(cut + surplus, len(token_ids))] if surplus > 0 else [range(start, cut)]
        for part in parts:
            if part.start > cut:
                text.append(omission_line(surplus, "tokens"), style="dim")
            before = max(0, part.start - MAX_CHARACTER_TOKENS)  # a character may start there
            tokens = self.split(token_ids[before : part.stop])[part.start - before :]
            for position, token in zip(part, tokens, strict=True):
                text.append(escape_unprintable(token), style=style(position))
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        key = tuple(ids)
        if key not in self._decoded:
            if len(self._decoded) >= MAX_REMEMBERED:
                self._decoded.clear()
            self._decoded[key] = str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""
        return self._decoded[key]


def shorten(text: str) -> str:
    """Return a text for a terminal, without the middle if it is very long."""
    surplus = len(text) - MAX_SHOWN
    if surplus > 0:
        text = text[: MAX_SHOWN // 2] + omission_line(surplus, "characters") + text[-MAX_SHOWN // 2 :]
    return escape_unprintable(text)


def omission_line(number: int, what: str) -> str:
    """Return a line that replaces omitted content."""
    return f"\n... {number} {what} are not shown ...\n"
