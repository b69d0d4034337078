"""What a policy may meet in a rollout: tools that it calls, and environments that it acts in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ..types import Prompt
from . import Component


class ToolError(Exception):
    """What went wrong in a call, in words for the policy."""


class Tool(Component, slot="tools", default_kind="function"):
    """Something that a policy may call, listed under ``[[workflow.tools]]``.

    Settings say how it works; `implementation` gives what is called. Its name, signature and docstring are what the
    policy is told: every argument needs a type, and an ``Args:`` section may describe them.
    """

    isolated: ClassVar[bool] = True
    """True to make every call in a process that is thrown away; False for tools that keep their calls apart alone."""

    @abstractmethod
    def implementation(self) -> Callable[..., Any]:
        """The function, async or not. What it raises is told to the policy; it returns text, or what JSON can hold."""

    def warm(self) -> None:
        """Import and read what calls need, once in each process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What came of an action."""

    observation: str = ""
    """What the policy reads next; of the last step nobody reads it."""
    reward: float = 0.0
    """Of this step; their sum is the episode's."""
    done: bool = False
    """True if the episode has ended."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Kept with the sample; that of the last step wins. JSON types."""


class Episode(Protocol):
    """One run through an environment. Methods may be async; others are called in threads."""

    def reset(self, seed: int, prompt: Prompt) -> str | Awaitable[str]:
        """Begin; the first observation, which follows the prompt. All rollouts of a prompt get one seed."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Take the policy's words for an action."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Called once, however the episode ends."""
        ...


class Environment(Component, slot="environments"):
    """Where episodes take place, chosen by ``[workflow.environment] kind = ...``."""

    @abstractmethod
    def episode(self) -> Episode:
        """A new episode. Many run at once."""
