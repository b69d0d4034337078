"""Tokenization and chat templates. Imports transformers when a tokenizer is opened, and never torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
from plasmid.components import PromptEncoder
from plasmid.components.rollouts import SEPARATOR, unescape
from plasmid.config.run import ModelConfig
from plasmid.errors import DataError, ModelError, PlasmidError, one_line
from plasmid.types import Ints

from .special_tokens import SpecialTokens
from .templates import render_templates_in_subprocess
from .tokenizer_files import FAST, FILES, check_tokenizer_files, has_tokenizer

OURS = ("continue_final_message", "add_generation_prompt")
"""Arguments that have an effect even if the chat template does not read them."""
UNTRUSTED = ("tools", "documents")
"""Arguments that may come from agents and data, so control tokens in them are escaped."""


class Tokenizer:
    """Tokenizer of a Hugging Face folder. Picklable: unpickling opens it again from its files."""

    def __init__(self, path: str | Path, *, chat_template: str = "auto", trust_remote_code: bool = False) -> None:
        """Open the tokenizer; ``chat_template`` is a Jinja file or ``auto`` for its own. Raises `ModelError`."""
        self._source = (str(path), chat_template, trust_remote_code)
        self._hf = _open(Path(path), trust_remote_code)
        if chat_template != "auto":
            self._hf.chat_template = _read_template(Path(chat_template))
        self._special = SpecialTokens(self._hf)

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """Open the tokenizer of a recipe's ``[model]``."""
        return cls(model.tokenizer_path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self._source

    @property
    def eos_token_id(self) -> int | None:
        """End-of-text token; None if the tokenizer has none."""
        return None if self._hf.eos_token_id is None else int(self._hf.eos_token_id)

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Texts of all control tokens, in the order of their ids."""
        return self._special.texts

    @property
    def pad_token_id(self) -> int:
        """Padding token: the tokenizer's own, else the end-of-text token, else 0."""
        pad = self._hf.pad_token_id
        return int(pad) if pad is not None else self.eos_token_id or 0

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """Encode text without adding special tokens.

        Special tokens spelled out in the text are recognized, except those that `render` escaped in messages; with
        ``allow_special`` false, none are. Raises `DataError` if the tokenizer cannot encode the text, or cannot encode
        a special token as plain text.
        """
        try:
            if not allow_special:
                return np.asarray(self._special.encode_plain(text), np.int32)
            if SEPARATOR in text:
                return np.asarray(self._special.encode(text), np.int32)
            # verbose would warn about texts that are longer than the model allows, which are handled elsewhere
            return np.asarray(self._hf.encode(text, add_special_tokens=False, verbose=False), np.int32)
        except PlasmidError:
            raise
        except Exception as error:  # boundary: broken files make tokenizers raise anything
            raise DataError(f"the tokenizer in {self._source[0]} cannot encode a text: {one_line(error)}") from error

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Decode tokens to text, without special tokens unless ``keep_special``."""
        ids = np.asarray(token_ids).tolist()
        return str(self._hf.decode(ids, skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False))

    def encode_prompt(
        self, prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
    ) -> tuple[Ints, str]:
        """Return token ids and text of a plain-text prompt, or of messages rendered by the chat template.

        ``template`` are the arguments of the chat template. Without ``tokenize`` there are no token ids, and the text
        is that of `render`, which can be split and encoded in pieces. Raises `DataError` if there is no chat template,
        if it does not read an argument, or if it rejects the messages.
        """
        text = prompt if isinstance(prompt, str) else self.render(prompt, template)
        return (self.encode(text), unescape(text)) if tokenize else (np.zeros(0, np.int32), text)

    def render(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        """Render messages with the chat template, by default with the generation prompt.

        Escapes special tokens spelled out in messages, so that `encode` treats them as plain text. Raises `DataError`
        as `encode_prompt` does.
        """
        self._check_arguments(template)
        ends = not template.get("continue_final_message", False)
        untrusted = {name: self._special.escape(template[name]) for name in UNTRUSTED if name in template}
        arguments = {"add_generation_prompt": ends, **template, **untrusted}
        conversation = [self._special.escape(message) for message in messages]
        try:
            return str(self._hf.apply_chat_template(conversation, tokenize=False, **arguments))
        except Exception as error:  # boundary: chat templates are programs that come with models
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"the chat template rejects the messages: {what}") from error

    def _check_arguments(self, template: Mapping[str, Any]) -> None:
        try:
            source = self._hf.get_chat_template(tools=template.get("tools"))
        except ValueError:
            raise DataError(
                f"the tokenizer in {self._source[0]} has no chat template, and the prompt is a chat; set "
                "model.chat_template to a Jinja file, or use prompts of plain text"
            ) from None
        for name in template:
            if name not in OURS and not re.search(rf"\b{re.escape(name)}\b", source):
                raise DataError(f"data.template.{name}: the chat template never reads it; remove it")


def prompt_encoder(model: ModelConfig) -> PromptEncoder:
    """Return `Tokenizer.encode_prompt` of a recipe's model; the tokenizer is opened lazily, after rows were checked."""

    @cache
    def tokenizer() -> Tokenizer:
        return Tokenizer.of(model)

    def encode(
        prompt: str | Sequence[Mapping[str, Any]], template: Mapping[str, Any], *, tokenize: bool = True
    ) -> tuple[Ints, str]:
        return tokenizer().encode_prompt(prompt, template, tokenize=tokenize)

    return encode


def _reopen(path: str, chat_template: str, trust_remote_code: bool) -> Tokenizer:
    return Tokenizer(path, chat_template=chat_template, trust_remote_code=trust_remote_code)


def _open(path: Path, trust_remote_code: bool) -> Any:
    render_templates_in_subprocess()
    if not path.is_dir():
        raise ModelError(f"model.path: no such folder: {path}")
    fast = (path / FAST).is_file()
    if not (trust_remote_code or has_tokenizer(path)):
        raise ModelError(
            f"model.path: {path} has no tokenizer ({', '.join(FILES)}); copy it there, or set model.tokenizer to the "
            "folder that has it"
        )
    check_tokenizer_files(path)
    try:
        if fast and not trust_remote_code:
            # AutoTokenizer would import torch (3 s) only to find this class, and would rebuild the tokenizer
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # boundary: broken files make tokenizers raise anything
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"model.path: the tokenizer in {path} cannot be loaded: {what}") from error


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = (error.strerror or str(error)).lower() if isinstance(error, OSError) else "not valid UTF-8"
        raise ModelError(f"model.chat_template: cannot read {file}: {what}") from None
