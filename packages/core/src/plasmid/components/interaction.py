"""Base classes of tools, which the policy calls in a rollout, and environments, in which it acts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ..types import Prompt
from . import Component


class ToolError(Exception):
    """Error of a tool call. The policy receives its message."""


class Tool(Component, slot="tools", default_kind="function"):
    """A function that the policy can call, listed under ``[[workflow.tools]]``.

    Fields are its settings, and `implementation` returns the function. The policy sees the function's name, signature
    and docstring: every argument needs a type annotation, and an ``Args:`` section can describe the arguments.
    """

    isolated: ClassVar[bool] = True
    """True to run each call in a disposable process; False for tools that isolate calls themselves."""

    @abstractmethod
    def implementation(self) -> Callable[..., Any]:
        """Return the function, sync or async. It returns text or JSON types; the policy sees the errors it raises."""

    def warm(self) -> None:
        """Load the modules and files that calls need, once per process."""


class ToolServer(Tool):
    """A program that provides tools and describes them. One entry of ``[[workflow.tools]]`` adds all of its tools."""

    isolated: ClassVar[bool] = False

    def implementation(self) -> Callable[..., Any]:
        raise TypeError("a server's tools have no Python functions")

    @abstractmethod
    async def connect(self) -> Sequence[Mapping[str, Any]]:
        """Connect and return the tools in chat-template format (`type`, `function`). Raises `ConfigError`."""

    @abstractmethod
    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool. Raises `ToolError`, whose message the policy receives."""

    @abstractmethod
    async def disconnect(self) -> None:
        """Close the connection, and stop the program if `connect` started it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Result of an action."""

    observation: str = ""
    """Text for the policy; unused after the last step."""
    reward: float = 0.0
    """Reward of this step; the episode's reward is the sum over its steps."""
    done: bool = False
    """True if the episode has ended."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Metadata stored with the sample, as JSON types; later steps override earlier ones."""


class Episode(Protocol):
    """One episode in an environment. Methods may be async; if none is, each episode runs in its own process."""

    def reset(self, seed: int, prompt: Prompt) -> str | Awaitable[str]:
        """Start the episode and return the first observation, which follows the prompt.

        All rollouts of a prompt get the same seed.
        """

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Apply an action, given as the policy's text."""

    def close(self) -> Awaitable[None] | None:
        """Release resources. Called once, also if the episode fails; does nothing by default."""
        return None


class Environment(Component, slot="environments"):
    """An environment for multi-turn rollouts, selected by ``[workflow.environment] kind = ...``."""

    isolated: ClassVar[bool] = True
    """True to run the environment in a process that forks for each episode, so that a hanging step can be killed.
    False for environments that need the engine or keep state across episodes."""

    @abstractmethod
    def episode(self) -> Episode:
        """Create an episode. Many episodes run concurrently."""
