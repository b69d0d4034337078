"""Base class of workflows, which turn one prompt into samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..types import Completion, Ints, Message, Prompt, Sample, SamplingParams
from .base import Component

SEPARATOR = "\ufdd0"
"""Unicode noncharacter that `Rollout.render` inserts into special tokens that the text of a message spells out."""


def unescape(text: str) -> str:
    """Remove the separators that `Rollout.render` added."""
    return text.replace(SEPARATOR, "")


class Codec(Protocol):
    """The part of a tokenizer that workflows need."""

    def decode(self, token_ids: Ints, *, keep_special: bool = False) -> str:
        """Convert tokens to text, without special tokens unless ``keep_special``."""

    def encode(self, text: str, *, allow_special: bool = True) -> Ints:
        """Convert text to tokens, without adding special tokens.

        Special tokens that the text spells out are recognized, unless ``allow_special`` is false or they came from a
        message that `render` formatted.
        """

    def render(self, messages: Sequence[Message], template: Mapping[str, Any]) -> str:
        """Format messages with the chat template and these arguments, including the generation prompt.

        Raises `DataError` if the template rejects them.
        """


class Rollout(Codec, Protocol):
    """The interface of a workflow to one rollout."""

    id: str
    """Rollout id; also the engine's session id."""
    sampling: SamplingParams
    max_length: int | None
    """Maximum length of a sample including the prompt, in tokens; None if unknown."""
    group_seed: int
    """Seed shared by all rollouts of a prompt group, so that their environments start in the same state."""

    async def generate(
        self, token_ids: Ints, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """Generate a completion with the current policy. Seeds, ids and deadlines are set automatically.

        ``max_new_tokens`` can only lower the limit of `sampling`; ``stop`` adds to the stop strings of `sampling`.
        """

    def sample(self, prompt: Prompt, completions: Sequence[Completion | Ints], **fields: Any) -> Sample:
        """Build a sample from the prompt, completions (trained on) and plain tokens (tool replies, not trained on)."""


class Workflow(Component, slot="workflow", default_kind="single-turn"):
    """Turns one prompt into samples: by a single turn, several turns with tools, an environment, ..."""

    @abstractmethod
    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        """Run one rollout, which usually yields one sample. An exception becomes a sample with an error."""
