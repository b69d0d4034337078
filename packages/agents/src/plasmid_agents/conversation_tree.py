"""The conversations of one session as a tree of turns, found again by what an agent sends back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from plasmid.errors import DataError, TemplateError
from plasmid.types import Completion, Ints, Message
from plasmid_workflows.transcript import Chat, Transcript

from .chat import ChatRequest, Problem, Refused, Reply, assistant_message, fingerprint


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A turn of the policy and, through its transcript, everything before it."""

    transcript: Transcript
    continued: bool = False
    """True if a later turn goes on from this one; else it ends a branch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingTurn:
    """A turn that is about to be drawn."""

    transcript: Transcript
    parent: Turn | None


class ConversationTree:
    """Turns by the conversation that they end.

    A request goes on from the longest conversation that it repeats from the beginning; only what it adds is tokenised.
    Where it repeats none, or where the chat template would show the past in another way than the policy saw it, it
    begins a conversation of its own.
    """

    def __init__(self, chat: Chat, *, keep_past: bool) -> None:
        self._chat, self._keep_past = chat, keep_past
        self._turns: list[Turn] = []
        self._by_messages: dict[bytes, Turn] = {}
        self._by_text: dict[str, Turn] = {}

    @property
    def num_turns(self) -> int:
        """Turns that the policy has taken."""
        return len(self._turns)

    def open(self, request: ChatRequest) -> PendingTurn:
        """Where the request's turn begins. Raises `Refused` if the chat template refuses the messages."""
        try:
            return self._open_text(request.text) if request.text is not None else self._open_chat(request)
        except DataError as error:
            raise Refused(Problem.BAD_REQUEST, str(error)) from None

    def _open_chat(self, request: ChatRequest) -> PendingTurn:
        if request.messages[-1]["role"] == "assistant":
            raise Refused(Problem.BAD_REQUEST, "messages: the last one is the assistant's, there is nothing to answer")
        keys = conversation_keys(request)
        known = next((i for i in reversed(range(len(request.messages))) if keys[i] in self._by_messages), None)
        if known is not None:
            parent = self._by_messages[keys[known]]
            transcript = parent.transcript.fork()
            try:
                transcript.add(request.messages[known:])
                return PendingTurn(transcript=transcript, parent=parent)
            except (TemplateError, DataError):
                pass  # the template shows this conversation in another way: what it shows begins a branch
        template = {"tools": list(request.tools)} if request.tools else {}
        fresh = Transcript.of_messages(self._chat, request.messages, template=template, keep_past=self._keep_past)
        return PendingTurn(transcript=fresh, parent=None)

    def _open_text(self, text: str) -> PendingTurn:
        known = max((known for known in self._by_text if text.startswith(known)), key=len, default=None)
        if known is None:
            # an agent that asks for completions of text writes the whole prompt, special tokens included
            return PendingTurn(
                transcript=Transcript(self._chat, self._chat.encode(text), allow_special=True), parent=None
            )
        parent = self._by_text[known]
        transcript = parent.transcript.fork()
        if len(text) > len(known):
            transcript.add([{"content": text[len(known) :]}])
        return PendingTurn(transcript=transcript, parent=parent)

    def close(self, opened: PendingTurn, request: ChatRequest, completion: Completion, reply: Reply) -> None:
        """Remember a turn as it was drawn, under what an agent will send back of it."""
        opened.transcript.append(completion)
        turn = Turn(transcript=opened.transcript)
        self._turns.append(turn)
        if opened.parent is not None:
            opened.parent.continued = True
        if request.text is not None:
            self._by_text[request.text + self._chat.decode(completion.token_ids)] = turn
        else:
            self._by_messages[_next_key(conversation_keys(request)[-1], assistant_message(reply.text, reply.calls))] = (
                turn
            )

    def branches(self) -> list[tuple[Ints, list[Completion | Ints]]]:
        """Opening and parts of every branch, in the order in which they ended.

        A turn that several branches share is a completion in the first of them and plain tokens in the others, so that
        it is trained on once.
        """
        trained: set[int] = set()
        result: list[tuple[Ints, list[Completion | Ints]]] = []
        for turn in self._turns:
            if turn.continued:
                continue
            parts: list[Completion | Ints] = []
            for part in turn.transcript.parts:
                if isinstance(part, Completion) and id(part) in trained:
                    parts.append(part.token_ids)
                    continue
                parts.append(part)
                trained.add(id(part))
            result.append((turn.transcript.opening, parts))
        return result


def conversation_keys(request: ChatRequest) -> list[bytes]:
    """Key of the conversation before each message, and of all of it; tools are part of what the policy sees."""
    keys = [hashlib.sha256(json.dumps(request.tools, sort_keys=True).encode()).digest()]
    for message in request.messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    return hashlib.sha256(key + fingerprint(message).encode()).digest()
