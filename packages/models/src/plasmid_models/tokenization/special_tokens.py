"""Encode control tokens in untrusted text as plain text.

A chat template renders a conversation as one text. To distinguish the template's control tokens from those that a
message spells out, `SpecialTokens.escape` inserts a separator into the latter before rendering, and
`SpecialTokens.encode` encodes control tokens with a separator as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from plasmid.components.rollouts import SEPARATOR, unescape
from plasmid.errors import DataError

ROLE_MARK = re.compile(r"<[|\uff5c].+[|\uff5c]>")
"""Pattern of role tokens, which some tokenizers do not flag as special."""


class SpecialTokens:
    """Control tokens of a Hugging Face tokenizer: tokens flagged as special, and role tokens like ``<|User|>``.

    Other added tokens, such as ``<think>``, may appear in any text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        control = {t.content: (i, t) for i, t in added if t.content and (t.special or ROLE_MARK.fullmatch(t.content))}
        self._ids = {content: token_id for content, (token_id, _) in control.items()}
        # like the tokenizers library: prefer the longest token, and include the white space that it strips
        longest_first = sorted(control, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        patterns = [_pattern(control[content][1]) for content in longest_first]
        self._split = re.compile("|".join(patterns) or "(?!)")

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts of the control tokens, in the order of their ids."""
        return tuple(sorted(self._ids, key=self._ids.__getitem__))

    def escape(self, value: Any) -> Any:
        """Return a copy of a message or another JSON value with all spelled-out control tokens escaped."""
        if isinstance(value, str):
            return self._spelled.sub(lambda found: found[0][:1] + SEPARATOR + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        return [self.escape(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Encode a text, with escaped control tokens as plain text."""
        ids: list[int] = []
        end = 0
        for found in self._split.finditer(text):
            ids += self.encode_plain(unescape(text[end : found.start()]), is_first=not end)
            ids.append(self._ids[found[0]] if found[0] in self._ids else self._ids[found[0].strip()])
            end = found.end()
        return ids + self.encode_plain(unescape(text[end:]), is_first=not end)

    def encode_plain(self, text: str, *, is_first: bool = True) -> list[int]:
        """Encode a text without recognizing control tokens. Raises `DataError` if the tokenizer cannot do that.

        ``is_first`` is false for text after a control token: some tokenizers prepend a space to the first text only.
        """
        if not text:
            return []
        if self._plain is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False, split_special_tokens=True)
        else:
            ids = self._plain[0 if is_first else 1].encode(text, add_special_tokens=False).ids
        for content, token_id in self._ids.items():
            if token_id in ids and token_id != self._tokenizer.unk_token_id:
                raise DataError(f"the text spells out {content!r}, which the tokenizer cannot encode as text")
        return list(ids)

    @cached_property
    def _plain(self) -> tuple[Any, Any] | None:
        """Copies of a fast tokenizer that recognize no control tokens: for the first text and for later ones."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        data = json.loads(backend.to_str())
        for token in data["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._ids
        first = type(backend).from_str(json.dumps(data))
        first.encode_special_tokens = True
        if getattr(first.pre_tokenizer, "prepend_scheme", None) != "first":
            return first, first
        other = type(backend).from_str(json.dumps(data))
        other.encode_special_tokens = True
        other.pre_tokenizer.prepend_scheme = "never"
        return first, other


def _pattern(token: Any) -> str:
    return (r"\s*" if token.lstrip else "") + re.escape(str(token.content)) + (r"\s*" if token.rstrip else "")
