"""A tree of the turns of one session. A request is matched to earlier turns by the messages that it repeats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

from plasmid.components.rollouts import Codec
from plasmid.errors import DataError, TemplateError
from plasmid.types import Completion, Ints, Message
from plasmid_workflows.transcript import Transcript

from .chat import ChatRequest, Problem, Reply, RequestError, assistant_message, fingerprint


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """A turn of the policy. Its transcript also contains everything before it."""

    transcript: Transcript
    continued: bool = False
    """Whether a later turn continues this one; if not, this turn is the last one of a branch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingTurn:
    """A turn that is about to be generated."""

    transcript: Transcript
    parent: Turn | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch:
    """The tokens on the path from the root of the tree to one of its leaves."""

    opening: Ints
    parts: list[Completion | Ints] = field(default_factory=list)
    turn_ends: list[int | None]
    """Position of the last token of each turn of the session; None for turns that this branch does not train on."""


class ConversationTree:
    """Stores every turn under the conversation up to and including it.

    A request continues the longest stored conversation that is a prefix of it, and only its new messages are tokenized.
    If there is none, or if the chat template would now render the earlier messages differently from what the policy
    saw, the request starts a new conversation.
    """

    def __init__(self, codec: Codec, *, keep_past: bool) -> None:
        self._codec, self._keep_past = codec, keep_past
        self._turns: list[Turn] = []
        self._by_messages: dict[bytes, Turn] = {}
        self._by_text: dict[str, Turn] = {}

    @property
    def num_turns(self) -> int:
        """Return the number of turns that the policy has taken."""
        return len(self._turns)

    def open(self, request: ChatRequest) -> PendingTurn:
        """Find the conversation that the request continues, or start a new one.

        Raises `RequestError` if the chat template refuses the messages.
        """
        try:
            return self._open_text(request.text) if request.text is not None else self._open_chat(request)
        except DataError as error:
            raise RequestError(Problem.BAD_REQUEST, str(error)) from None

    def _open_chat(self, request: ChatRequest) -> PendingTurn:
        if request.messages[-1]["role"] == "assistant":
            raise RequestError(Problem.BAD_REQUEST, "messages: the last message must not be the assistant's")
        keys = conversation_keys(request)
        known = next((i for i in reversed(range(len(request.messages))) if keys[i] in self._by_messages), None)
        if known is not None:
            parent = self._by_messages[keys[known]]
            transcript = parent.transcript.fork()
            try:
                transcript.add(request.messages[known:])
                return PendingTurn(transcript=transcript, parent=parent)
            except (TemplateError, DataError):
                pass  # the template renders this conversation differently, so it starts a branch
        template = {"tools": list(request.tools)} if request.tools else {}
        fresh = Transcript.of_messages(self._codec, request.messages, template=template, keep_past=self._keep_past)
        return PendingTurn(transcript=fresh, parent=None)

    def _open_text(self, text: str) -> PendingTurn:
        known = max((known for known in self._by_text if text.startswith(known)), key=len, default=None)
        if known is None:
            # an agent that requests text completions writes the whole prompt, special tokens included
            return PendingTurn(
                transcript=Transcript(self._codec, self._codec.encode(text), allow_special=True), parent=None
            )
        parent = self._by_text[known]
        transcript = parent.transcript.fork()
        if len(text) > len(known):
            transcript.add([{"content": text[len(known) :]}])
        return PendingTurn(transcript=transcript, parent=parent)

    def close(self, opened: PendingTurn, request: ChatRequest, completion: Completion, reply: Reply) -> None:
        """Store a sampled turn under the messages with which the agent will refer to it."""
        opened.transcript.append(completion)
        turn = Turn(transcript=opened.transcript)
        self._turns.append(turn)
        if opened.parent is not None:
            opened.parent.continued = True
        if request.text is not None:
            self._by_text[request.text + self._codec.decode(completion.token_ids)] = turn
        else:
            self._by_messages[_next_key(conversation_keys(request)[-1], assistant_message(reply.text, reply.calls))] = (
                turn
            )

    def branches(self) -> list[Branch]:
        """Return every branch, in the order of their last turns.

        A turn shared by several branches is a completion in the first of them and plain tokens in the others, so that
        it is trained on once.
        """
        untrained = {id(turn.transcript.parts[-1]): number for number, turn in enumerate(self._turns)}
        result: list[Branch] = []
        for turn in self._turns:
            if turn.continued:
                continue
            position = len(turn.transcript.opening) - 1
            branch = Branch(opening=turn.transcript.opening, turn_ends=[None] * len(self._turns))
            for part in turn.transcript.parts:
                ids = part.token_ids if isinstance(part, Completion) else part
                position += len(ids)
                number = untrained.pop(id(part), None)
                branch.parts.append(ids if number is None else part)
                if number is not None:
                    branch.turn_ends[number] = position
            result.append(branch)
        return result


def conversation_keys(request: ChatRequest) -> list[bytes]:
    """Return a key for every prefix of the conversation, from no messages to all. The tools are part of every key,
    because the policy sees them."""
    keys = [hashlib.sha256(json.dumps(request.tools, sort_keys=True).encode()).digest()]
    for message in request.messages:
        keys.append(_next_key(keys[-1], message))
    return keys


def _next_key(key: bytes, message: Message) -> bytes:
    return hashlib.sha256(key + fingerprint(message).encode()).digest()
