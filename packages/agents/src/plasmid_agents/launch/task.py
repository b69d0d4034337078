"""What an agent is started with, and what it gives back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plasmid.types import Prompt


class AgentFailed(Exception):
    """An agent raised, ended with an error, or died. Says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an agent gave back."""

    answer: str | None = None
    """What rewards see in place of the policy's last turn; None if the agent says nothing of its own."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Goes into the metadata of the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt for one agent. The target stays with the rewards."""

    prompt: str
    """The last message of the user, or all of a prompt of plain text."""
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    """The other columns of the row."""
    base_url: str
    """What OpenAI's clients take: it ends in ``/v1``."""
    api_key: str
    seed: int
    """Follows from the run's seed and the rollout."""

    @staticmethod
    def of(prompt: Prompt, *, url: str, key: str, seed: int) -> Task:
        """The task of a prompt."""
        messages = [dict(m) for m in prompt.messages] or [{"role": "user", "content": prompt.text}]
        said = [str(m.get("content", "")) for m in messages if m.get("role") == "user"]
        return Task(
            prompt=said[-1] if said else "",
            messages=messages,
            metadata=dict(prompt.metadata),
            base_url=f"{url}/v1",
            api_key=key,
            seed=seed,
        )

    def arguments(self) -> dict[str, Any]:
        """By name, what a function may take."""
        return {
            "prompt": self.prompt,
            "messages": self.messages,
            "metadata": self.metadata,
            "base_url": self.base_url,
            "api_key": self.api_key,
            "seed": self.seed,
        }

    def environment(self) -> dict[str, str]:
        """Variables that existing clients read, so that agents need not be changed."""
        root = self.base_url.removesuffix("/v1")
        # without this a proxy of the machine would be asked for a server that only this machine knows
        host = root.partition("://")[2].rpartition(":")[0].partition("/")[0].partition(":")[0]
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
            "PLASMID_SEED": str(self.seed),
            "NO_PROXY": host,
            "no_proxy": host,
        }

    def document(self) -> str:
        """The task as JSON, for programs that want more than the prompt."""
        return json.dumps({"prompt": self.prompt, "messages": self.messages, "metadata": self.metadata}, default=str)
