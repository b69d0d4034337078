"""The tokens of one conversation by who made them: what the policy drew stays as drawn, the rest is not trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np
from plasmid.components import Rollout
from plasmid.components.rollouts import unescape
from plasmid.errors import DataError, TemplateError
from plasmid.types import Completion, Ints, Message, Prompt, Sample, StopReason

MARK = "standin5b7e91c4"
"""Stands behind an assistant's words to find where a template goes on; no template changes letters and digits."""
Call = dict[str, Any]


class Chat(Protocol):
    """What a transcript needs of a tokenizer. `Rollout` has it."""

    def encode(self, text: str, *, allow_special: bool = True) -> Ints: ...

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str: ...

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str: ...


class Transcript:
    """A prompt, and behind it what the policy drew (`append`) and what it was told (`add`), token by token.

    The history is never tokenised again: what the chat template puts between two turns is found by rendering the
    conversation as text with a mark behind the last turn, and only what follows the mark is tokenised. Without messages
    (a prompt of plain text) the contents of new messages follow as they are.
    """

    def __init__(
        self,
        chat: Chat,
        opening: Ints,
        messages: Sequence[Message] = (),
        *,
        template: Mapping[str, Any] | None = None,
        keep_past: bool = False,
        allow_special: bool = False,
    ) -> None:
        """``opening`` are the tokens of ``messages`` with the generation prompt, or of plain text.

        ``keep_past`` goes on where the template would now leave out words of the policy, such as earlier reasoning.
        ``allow_special`` recognizes special tokens in what is added to plain text; messages of a chat have none.
        """
        self.opening: Ints = np.asarray(opening, np.int32)
        """[P] the tokens before the first turn."""
        self.parts: list[Completion | Ints] = []
        """What follows: completions, which are trained on, and plain tokens, which are not."""
        self._chat, self._template, self._keep_past = chat, dict(template or {}), keep_past
        self._allow_special = allow_special
        self._messages = tuple(messages)
        self._history: list[Message] = []
        self._turn: list[Completion] = []

    @classmethod
    def of_prompt(
        cls, chat: Chat, prompt: Prompt, *, template: Mapping[str, Any] | None = None, keep_past: bool = False
    ) -> Self:
        """Begin with a prompt as it is; ``template`` adds to its arguments, and the prompt is then rendered anew."""
        if template and prompt.messages:
            both = {**prompt.template, **template}
            return cls.of_messages(chat, prompt.messages, template=both, keep_past=keep_past)
        return cls(chat, prompt.token_ids, prompt.messages, template=prompt.template, keep_past=keep_past)

    @classmethod
    def of_messages(
        cls,
        chat: Chat,
        messages: Sequence[Message],
        *,
        template: Mapping[str, Any] | None = None,
        keep_past: bool = False,
    ) -> Self:
        """Begin with messages through the chat template. Raises `DataError` if it refuses them."""
        opening = chat.encode(chat.render(messages, template or {}))
        return cls(chat, opening, messages, template=template, keep_past=keep_past)

    def fork(self) -> Self:
        """A conversation that goes on from here by itself. Both hold the same completions."""
        other = copy(self)
        other.parts, other._history, other._turn = self.parts.copy(), self._history.copy(), self._turn.copy()
        return other

    @property
    def token_ids(self) -> Ints:
        """[L] everything so far: what the policy is to continue."""
        parts = [part.token_ids if isinstance(part, Completion) else part for part in self.parts]
        return _concatenate([self.opening, *parts])

    @property
    def num_tokens(self) -> int:
        """L."""
        parts = (part.token_ids if isinstance(part, Completion) else part for part in self.parts)
        return len(self.opening) + sum(map(len, parts))

    def append(self, completion: Completion) -> None:
        """The policy drew this. Several completions in a row are one turn."""
        self.parts.append(completion)
        self._turn.append(completion)

    def turn_text(self, *, keep_special: bool = False) -> str:
        """Text of the policy's turn that is not followed by anything yet."""
        return self._chat.decode(self._turn_ids(), keep_special=keep_special)

    def add(self, messages: Sequence[Message]) -> Ints:
        """End the policy's turn, put messages behind it and begin its next turn; the tokens that this takes.

        Raises `TemplateError` if the chat template cannot go on from what was drawn, and `DataError` if it refuses the
        messages. Nothing is added then.
        """
        if not self._turn:
            raise ValueError("messages follow a turn of the policy: append a completion first")
        if self._messages:
            text_of_turn = self.turn_text()
            ids = self._tokens_after(text_of_turn, messages)
            self._history += [{"role": "assistant", "content": text_of_turn}, *messages]
        else:
            text = "".join(str(message.get("content", "")) for message in messages)
            ids = self._chat.encode(text, allow_special=self._allow_special)
        self.parts.append(ids)
        self._turn = []
        return ids

    def sample(self, rollout: Rollout, prompt: Prompt, **fields: Any) -> Sample:
        """The conversation as a training row; ``prompt`` says what it answers.

        What was added last is left out if the policy drew nothing behind it: nothing would be learned from it.
        """
        parts = self.parts if self._turn else self.parts[:-1]
        return rollout.sample(replace(prompt, token_ids=self.opening), parts, **fields)

    def _turn_ids(self) -> Ints:
        return _concatenate([part.token_ids for part in self._turn])

    def _tokens_after(self, text_of_turn: str, messages: Sequence[Message]) -> Ints:
        """What the template puts behind the last turn, new messages and generation prompt included."""
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
                "the chat template does not show an assistant's message once, so that what follows it cannot be found; "
                "set model.chat_template to one that does"
            )
        self._check_past(before, text_of_turn, messages)
        if self._shows(past, last, messages):
            return self._without_own_end(self._chat.encode(after))
        return self._tokens_after_call(messages)

    def _shows(self, past: Sequence[Message], last: Message, messages: Sequence[Message]) -> bool:
        """True if the template renders the new messages; some leave out results of calls that they have not seen."""
        marked = [{**m, "content": f"{MARK}{i}end"} for i, m in enumerate(messages)]
        shown = self._render([*past, last, *marked])
        return all(str(m["content"]) in shown for m in marked)

    def _past(self, text_of_turn: str) -> tuple[list[Message], dict[str, Any]]:
        """All messages before the last turn, and the last turn."""
        conversation = [*self._messages, *self._history]
        if not self._history and self._template.get("continue_final_message"):
            first = dict(conversation.pop())
            return conversation, {**first, "content": str(first.get("content", "")) + text_of_turn}
        return conversation, {"role": "assistant", "content": text_of_turn}

    def _tokens_after_call(self, messages: Sequence[Message]) -> Ints:
        """As `_tokens_after`, for templates that take a tool's message only behind a call: what follows a call."""
        call = _call(messages[0])
        with_call = self._render([*self._messages, call], ends=False)
        followed = self._render([*self._messages, call, *messages])
        if not followed.startswith(with_call) or not self._shows(self._messages, call, messages):
            raise TemplateError(
                f"the chat template does not show messages of {messages[0].get('role')!r} behind an assistant's; "
                "set model.chat_template to one that does"
            )
        space = with_call[len(with_call.rstrip()) :]
        rest = self._chat.encode(space + followed[len(with_call) :])
        was_ended = self._turn[-1].stop_reason is StopReason.STOP and self._is_special(self._turn_ids()[-1:])
        return rest if was_ended else _concatenate([self._end(), rest])

    def _check_past(self, before: str, text_of_turn: str, messages: Sequence[Message]) -> None:
        """Compare the past as rendered now with what the policy has seen and drawn."""
        if self._keep_past:
            return
        who = " and ".join(dict.fromkeys(f"{message.get('role')!r}" for message in messages))
        way_out = "keep the conversation as it was with keep_past = true, or set model.chat_template to one that does"
        first = self._messages[:-1] if self._template.get("continue_final_message") else self._messages
        # without the generation prompt some templates end the whole text, with it others begin to think
        if first and not any(before.startswith(self._render(first, ends=ends)) for ends in (False, True)):
            raise TemplateError(
                f"the chat template renders the first messages in another way once one of {who} follows; {way_out}"
            )
        drawn = [str(m["content"]) for m in self._history if m.get("role") == "assistant"]
        rest = _without_spaces(before)
        for text in map(_without_spaces, [*drawn, text_of_turn]):
            _, found, rest = rest.partition(text) if text else ("", "-", rest)
            if not found:
                raise TemplateError(
                    "the chat template leaves out what the policy wrote before (such as its reasoning) once a message "
                    f"of {who} follows; {way_out}"
                )

    def _without_own_end(self, ids: Ints) -> Ints:
        """Leave out the end of turn that the policy drew itself; templates' ends are for turns that were cut off."""
        drawn = self._turn_ids()
        if not len(drawn) or not len(ids) or self._turn[-1].stop_reason is not StopReason.STOP:
            return ids
        if drawn[-1] == ids[0]:
            return ids[1:]
        # another end than the template's: only where turns end with a token at all, not with the next one's beginning
        ends = self._is_special(drawn[-1:]) and self._is_special(ids[:1]) and self._is_special(self._end()[:1])
        return ids[1:] if ends else ids

    def _is_special(self, token: Ints) -> bool:
        return len(token) > 0 and not self._chat.decode(token)

    def _end(self) -> Ints:
        """What the template ends an assistant's message with that nothing follows."""
        alone = self._render([*self._messages, {"role": "assistant", "content": MARK}], ends=False)
        return self._chat.encode(alone.partition(MARK)[2])

    def _render(self, messages: Sequence[Message], *, ends: bool = True) -> str:
        template = {k: v for k, v in self._template.items() if k != "continue_final_message"}
        return self._chat.render(messages, {**template, "add_generation_prompt": ends})


def _call(result: Message) -> Message:
    """A call that a tool's message may be the result of."""
    function = {"name": result.get("name", "tool"), "arguments": {}}
    call: Call = {"id": result.get("tool_call_id", "call00000"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _concatenate(parts: Sequence[Ints]) -> Ints:
    tokens: Ints = np.concatenate([np.zeros(0, np.int32), *parts]).astype(np.int32)
    return tokens


def _without_spaces(text: str) -> str:
    return "".join(unescape(text).split())
