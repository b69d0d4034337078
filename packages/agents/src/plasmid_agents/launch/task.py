"""Input and output of an agent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from plasmid.types import Prompt


class AgentFailed(Exception):
    """An agent raised, exited with an error, or died. The message says which of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of an agent."""

    answer: str | None = None
    """Text that rewards see instead of the policy's last turn; None if the agent returned no answer."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Added to the metadata of the samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt for one agent. The target is visible to rewards only."""

    prompt: str
    """The last user message, or all of a plain-text prompt."""
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    """The other columns of the row."""
    base_url: str
    """Base URL for OpenAI's clients; ends in ``/v1``."""
    api_key: str
    seed: int
    """Derived from the run's seed and the rollout."""

    @staticmethod
    def of(prompt: Prompt, *, url: str, key: str, seed: int) -> Task:
        """Create the task of a prompt."""
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
        """Return the arguments that a function may accept, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def environment(self) -> dict[str, str]:
        """Return variables that existing clients read, so that agents work unchanged."""
        root = self.base_url.removesuffix("/v1")
        # otherwise a configured proxy would get requests for a server that only this machine can reach
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
        """Return the task as JSON, for programs that need more than the prompt."""
        return json.dumps({"prompt": self.prompt, "messages": self.messages, "metadata": self.metadata}, default=str)
