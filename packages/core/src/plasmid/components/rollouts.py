"""What a plugin subclasses to turn one prompt into samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..types import Completion, Ints, Message, Prompt, Sample, SamplingParams
from .base import Component

SEPARATOR = "\ufdd0"
"""Marks control tokens that a message spells out in what `Rollout.render` returns. Unicode reserves it for such use."""


def unescape(text: str) -> str:
    """The text without separators, as it was before `Rollout.render`."""
    return text.replace(SEPARATOR, "")


class Rollout(Protocol):
    """What one execution of a workflow may use."""

    id: str
    """Rollout id; also the engine's session id."""
    sampling: SamplingParams
    max_length: int | None
    """Longest sample in tokens, prompt included; None where no limit is known."""
    group_seed: int
    """The same for all rollouts of one draw of a prompt: environments begin alike."""

    async def generate(
        self, token_ids: Ints, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Continue the tokens by the current policy; seeds, ids and deadlines are taken care of.

        ``max_new_tokens`` may only lower that of `sampling`; the texts ``stop`` end the completion besides its own.
        """
        ...

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Tokens to text, special tokens left out unless they are asked for."""
        ...

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """Text to tokens, no special tokens added.

        Those that the text spells out are recognized, unless ``allow_special`` is false or `render` took them from a
        message.
        """
        ...

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Text of messages through the chat template with these arguments, the generation prompt included.

        Raises `DataError` if the template refuses them.
        """
        ...

    def sample(self, prompt: Prompt, completions: Sequence[Completion | Ints], **fields: Any) -> Sample:
        """A sample of the prompt, then completions (trained on) and plain tokens (tool replies, not trained on)."""
        ...


class Workflow(Component, slot="workflow", default_kind="single-turn"):
    """How one prompt becomes samples: a single turn, several turns with tools, an environment, ..."""

    @abstractmethod
    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        """One rollout. Usually makes one sample. An exception becomes a sample with an error."""
