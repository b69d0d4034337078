"""Tokens of a conversation. Sampled tokens are kept unchanged and trained on; all other tokens are context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np
from plasmid.components import Rollout
from plasmid.components.rollouts import Codec, unescape
from plasmid.errors import DataError, TemplateError
from plasmid.types import Completion, Ints, Message, Prompt, Sample, StopReason

MARK = "standin5b7e91c4"
"""Marker appended to an assistant's text, to find what a template renders after it. It consists of letters and digits,
which templates leave unchanged."""
Call = dict[str, Any]


class Transcript:
    """Token ids of a prompt, followed by turns of the policy (`append`) and messages to it (`add`).

    The history is never tokenized again. To find what the chat template puts between two turns, the conversation is
    rendered as text with a marker after the last turn, and only the text after the marker is tokenized. Without
    messages (a plain-text prompt) the contents of new messages are appended unchanged.
    """

    def __init__(
        self,
        codec: Codec,
        opening: Ints,
        messages: Sequence[Message] = (),
        *,
        template: Mapping[str, Any] | None = None,
        keep_past: bool = False,
        allow_special: bool = False,
    ) -> None:
        """``opening`` contains the tokens of ``messages`` with the generation prompt, or of plain text.

        ``keep_past`` keeps earlier text of the policy (such as reasoning) that the template would drop.
        ``allow_special`` recognizes special tokens in text that is added to a plain-text prompt; in chat messages they
        are never recognized.
        """
        self.opening: Ints = np.asarray(opening, np.int32)
        """Tokens [P] before the first turn."""
        self.parts: list[Completion | Ints] = []
        """Everything after the opening: completions, which are trained on, and plain tokens, which are not."""
        self._codec, self._template, self._keep_past = codec, dict(template or {}), keep_past
        self._allow_special = allow_special
        self._messages = tuple(messages)
        self._history: list[Message] = []
        self._turn: list[Completion] = []

    @classmethod
    def of_prompt(
        cls, codec: Codec, prompt: Prompt, *, template: Mapping[str, Any] | None = None, keep_past: bool = False
    ) -> Self:
        """Start with an unchanged prompt; with ``template``, render it again with these additional arguments."""
        if template and prompt.messages:
            both = {**prompt.template, **template}
            return cls.of_messages(codec, prompt.messages, template=both, keep_past=keep_past)
        return cls(codec, prompt.token_ids, prompt.messages, template=prompt.template, keep_past=keep_past)

    @classmethod
    def of_messages(
        cls,
        codec: Codec,
        messages: Sequence[Message],
        *,
        template: Mapping[str, Any] | None = None,
        keep_past: bool = False,
    ) -> Self:
        """Start with messages rendered by the chat template. Raises `DataError` if the template refuses them."""
        opening = codec.encode(codec.render(messages, template or {}))
        return cls(codec, opening, messages, template=template, keep_past=keep_past)

    def fork(self) -> Self:
        """Return a copy that can be continued independently. Both transcripts share the completions so far."""
        other = copy(self)
        other.parts, other._history, other._turn = self.parts.copy(), self._history.copy(), self._turn.copy()
        return other

    @property
    def token_ids(self) -> Ints:
        """Return all tokens so far [L]: the input for the policy's next completion."""
        parts = [part.token_ids if isinstance(part, Completion) else part for part in self.parts]
        return _concatenate([self.opening, *parts])

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens so far, L."""
        parts = (part.token_ids if isinstance(part, Completion) else part for part in self.parts)
        return len(self.opening) + sum(map(len, parts))

    def turn_ends(self) -> list[int]:
        """Return the position of the last token of each turn of the policy. For a turn without tokens, this is the
        position of the token before it."""
        ends, position = list[int](), len(self.opening) - 1
        for part, after in zip(self.parts, [*self.parts[1:], None], strict=True):
            is_drawn = isinstance(part, Completion)
            position += len(part.token_ids if isinstance(part, Completion) else part)
            if is_drawn and not isinstance(after, Completion):
                ends.append(position)
        return ends

    def append(self, completion: Completion) -> None:
        """Append tokens that the policy sampled. Several completions in a row are one turn."""
        self.parts.append(completion)
        self._turn.append(completion)

    def turn_text(self, *, keep_special: bool = False) -> str:
        """Return the text of the policy's current turn; empty once messages have been added after it."""
        return self._codec.decode(self._turn_ids(), keep_special=keep_special)

    def add(self, messages: Sequence[Message]) -> Ints:
        """End the policy's turn, append messages and start its next turn. Returns the added tokens.

        Raises `TemplateError` if the chat template cannot continue the sampled text, and `DataError` if it refuses the
        messages; the transcript is unchanged then.
        """
        if not self._turn:
            raise ValueError("messages can only be added after a turn of the policy; append a completion first")
        if self._messages:
            text_of_turn = self.turn_text()
            ids = self._tokens_after(text_of_turn, messages)
            self._history += [{"role": "assistant", "content": text_of_turn}, *messages]
        else:
            text = "".join(str(message.get("content", "")) for message in messages)
            ids = self._codec.encode(text, allow_special=self._allow_special)
        self.parts.append(ids)
        self._turn = []
        return ids

    def sample(self, rollout: Rollout, prompt: Prompt, **fields: Any) -> Sample:
        """Return the conversation as a training sample for ``prompt``.

        Tokens after the policy's last turn are left out, because they are not trained on.
        """
        parts = self.parts if self._turn else self.parts[:-1]
        return rollout.sample(replace(prompt, token_ids=self.opening), parts, **fields)

    def _turn_ids(self) -> Ints:
        return _concatenate([part.token_ids for part in self._turn])

    def _tokens_after(self, text_of_turn: str, messages: Sequence[Message]) -> Ints:
        """Return the tokens that the template adds after the last turn: new messages and the generation prompt."""
        past, last = self._past(text_of_turn)
        try:
            whole = self._render([*past, {**last, "content": last["content"] + MARK}, *messages])
        except DataError:
            if messages[0].get("role") != "tool":
                raise
            return self._tokens_after_call(messages)
        before, mark, after = whole.partition(MARK)
        if not mark or MARK in after:
            raise TemplateError(
                "the chat template does not render an assistant message exactly once, so the text after it cannot be "
                "located; set model.chat_template to one that does"
            )
        self._check_past(before, text_of_turn, messages)
        if self._renders_once(past, last, messages):
            return self._strip_own_end(self._codec.encode(after))
        return self._tokens_after_call(messages)

    def _renders_once(self, past: Sequence[Message], last: Message, messages: Sequence[Message]) -> bool:
        """Return whether the template renders all new messages; some omit tool results without a preceding call."""
        marked = [{**m, "content": f"{MARK}{i}end"} for i, m in enumerate(messages)]
        shown = self._render([*past, last, *marked])
        return all(str(m["content"]) in shown for m in marked)

    def _past(self, text_of_turn: str) -> tuple[list[Message], dict[str, Any]]:
        """Return all messages before the last turn, and the last turn."""
        conversation = [*self._messages, *self._history]
        if not self._history and self._template.get("continue_final_message"):
            first = dict(conversation.pop())
            return conversation, {**first, "content": str(first.get("content", "")) + text_of_turn}
        return conversation, {"role": "assistant", "content": text_of_turn}

    def _tokens_after_call(self, messages: Sequence[Message]) -> Ints:
        """Like `_tokens_after`, for templates that accept a tool message only after a tool call."""
        call = _call(messages[0])
        with_call = self._render([*self._messages, call], ends=False)
        followed = self._render([*self._messages, call, *messages])
        if not followed.startswith(with_call) or not self._renders_once(self._messages, call, messages):
            raise TemplateError(
                f"the chat template does not render messages of {messages[0].get('role')!r} after an assistant's; "
                "set model.chat_template to one that does"
            )
        space = with_call[len(with_call.rstrip()) :]
        rest = self._codec.encode(space + followed[len(with_call) :])
        was_ended = self._turn[-1].stop_reason is StopReason.STOP and self._is_special(self._turn_ids()[-1:])
        return rest if was_ended else _concatenate([self._end(), rest])

    def _check_past(self, before: str, text_of_turn: str, messages: Sequence[Message]) -> None:
        """Raise `TemplateError` if the template now renders earlier messages differently from what the policy saw."""
        if self._keep_past:
            return
        who = " and ".join(dict.fromkeys(f"{message.get('role')!r}" for message in messages))
        fix = "set keep_past = true or another model.chat_template"
        first = self._messages[:-1] if self._template.get("continue_final_message") else self._messages
        # without the generation prompt some templates end the whole text, with it others start thinking
        if first and not any(before.startswith(self._render(first, ends=ends)) for ends in (False, True)):
            raise TemplateError(
                f"the chat template renders earlier messages differently once a message of {who} follows; {fix}"
            )
        drawn = [str(m["content"]) for m in self._history if m.get("role") == "assistant"]
        rest = _remove_spaces(before)
        for text in map(_remove_spaces, [*drawn, text_of_turn]):
            _, found, rest = rest.partition(text) if text else ("", "-", rest)
            if not found:
                raise TemplateError(
                    "the chat template omits text that the policy wrote (such as its reasoning) once a message "
                    f"of {who} follows; {fix}"
                )

    def _strip_own_end(self, ids: Ints) -> Ints:
        """Remove the template's end-of-turn token if the policy already sampled one; only truncated turns need it."""
        drawn = self._turn_ids()
        if not len(drawn) or not len(ids) or self._turn[-1].stop_reason is not StopReason.STOP:
            return ids
        if drawn[-1] == ids[0]:
            return ids[1:]
        # the policy may have sampled another end-of-turn token than the template's; if the template has none, ids[0] is
        # the start of the next turn and stays
        ends = self._is_special(drawn[-1:]) and self._is_special(ids[:1]) and self._is_special(self._end()[:1])
        return ids[1:] if ends else ids

    def _is_special(self, token: Ints) -> bool:
        return len(token) > 0 and not self._codec.decode(token)

    def _end(self) -> Ints:
        """Return the tokens with which the template ends a final assistant message."""
        alone = self._render([*self._messages, {"role": "assistant", "content": MARK}], ends=False)
        return self._codec.encode(alone.partition(MARK)[2])

    def _render(self, messages: Sequence[Message], *, ends: bool = True) -> str:
        template = {k: v for k, v in self._template.items() if k != "continue_final_message"}
        return self._codec.render(messages, {**template, "add_generation_prompt": ends})


def _call(result: Message) -> Message:
    """Create an assistant message with a tool call to which a tool message can be the result."""
    function = {"name": result.get("name", "tool"), "arguments": {}}
    call: Call = {"id": result.get("tool_call_id", "call00000"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _concatenate(parts: Sequence[Ints]) -> Ints:
    tokens: Ints = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
    return tokens


def _remove_spaces(text: str) -> str:
    return "".join(unescape(text).split())
