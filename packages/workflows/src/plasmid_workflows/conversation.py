"""Multi-turn conversations and their limits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from plasmid.components import Rollout, Workflow
from plasmid.errors import ConfigError, DataError
from plasmid.types import Message, Prompt, Sample, StopReason
from pydantic import Field

from .transcript import Transcript


class Conversation(Workflow):
    """Base class of workflows with several turns of the policy."""

    max_turns: int = Field(8, ge=1)
    """Maximum number of policy turns per sample; ``sampling.max_new_tokens`` applies to each turn."""
    max_tokens: Literal["model"] | Annotated[int, Field(ge=1)] = "model"
    """Maximum length of a sample, in tokens, prompt and replies included; ``model`` is the model's limit."""
    timeout_s: Literal["run"] | Annotated[float, Field(gt=0)] = "run"
    """Time after which no further turn starts, in seconds. ``run`` sets no such limit; a rollout then fails after
    run.rollout_timeout_s."""
    keep_past: bool = False
    """Continue if the chat template would drop text of earlier turns, such as reasoning. If false, the rollout
    fails."""

    def begin(self, rollout: Rollout, transcript: Transcript) -> ConversationState:
        """Start a conversation under these limits. Raises `ConfigError` or `DataError` if there is no room for a
        turn."""
        limit = rollout.max_length
        if isinstance(self.max_tokens, int):
            if limit is not None and self.max_tokens > limit:
                raise ConfigError(
                    f"workflow.max_tokens: {self.max_tokens} is more than the {limit} tokens that the model takes; "
                    'lower it, or set it to "model"'
                )
            limit = self.max_tokens
        if limit is not None and transcript.num_tokens >= limit:
            raise DataError(
                f"the prompt of {transcript.num_tokens} tokens leaves no room for a turn (maximum {limit} tokens)"
            )
        seconds = None if self.timeout_s == "run" else self.timeout_s
        return ConversationState(rollout, transcript, max_turns=self.max_turns, max_tokens=limit, max_seconds=seconds)


@dataclass(slots=True, eq=False)
class ConversationState:
    """A conversation in progress and its remaining limits."""

    rollout: Rollout
    transcript: Transcript
    max_turns: int
    max_tokens: int | None
    max_seconds: float | None
    turns: int = 0
    cut_by: str = ""
    """The limit that ended the conversation; empty if none did."""
    messages: list[Message] = field(default_factory=list)
    """Messages after the prompt."""
    started: float = field(default_factory=time.monotonic)

    async def next_turn(self) -> str | None:
        """Generate the next turn and return its text; None if a limit is reached."""
        if self.is_over():
            return None
        left = None if self.max_tokens is None else self.max_tokens - self.transcript.num_tokens
        completion = await self.rollout.generate(self.transcript.token_ids, max_new_tokens=left)
        self.turns += 1
        self.transcript.append(completion)
        text = self.transcript.turn_text()
        self.messages.append({"role": "assistant", "content": text})
        return text

    @property
    def was_cut(self) -> bool:
        """Return whether the last turn was cut off."""
        last = self.transcript.parts[-1] if self.transcript.parts else None
        return getattr(last, "stop_reason", None) is StopReason.LENGTH

    def add_messages(self, messages: Sequence[Message]) -> None:
        """Append messages after the policy's turn."""
        self.transcript.add(messages)
        self.messages += messages

    def is_over(self) -> bool:
        """Return whether no further turn may start; `cut_by` then names the limit."""
        if self.turns >= self.max_turns:
            self.cut_by = "max_turns"
        elif self.max_tokens is not None and self.transcript.num_tokens >= self.max_tokens:
            self.cut_by = "max_tokens"
        elif self.max_seconds is not None and time.monotonic() - self.started > self.max_seconds:
            self.cut_by = "timeout_s"
        return bool(self.cut_by)

    def sample(self, prompt: Prompt, text: str, **metadata: Any) -> Sample:
        """Return the conversation as a training sample, with its messages in the metadata."""
        cut = {"cut_by": self.cut_by} if self.cut_by else {}
        return self.transcript.sample(
            self.rollout,
            prompt,
            text=text,
            stop_reason=StopReason.LENGTH if self.cut_by else StopReason.STOP,
            metadata={"turns": self.turns, **cut, **metadata, "messages": self.messages},
        )
