"""What every pluggable part is made of."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from ..protocols import RunContext


class Settings(BaseModel):
    """Base of everything that a recipe can set: unknown keys are errors, nothing changes after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class Component(Settings, ABC):
    """Base of every pluggable part. Declare ``kind: Literal["name"] = "name"`` to give it its name."""

    async def open(self, context: RunContext) -> None:
        """Called once before first use in each process that uses it. Keep what you open in a private attribute."""

    async def close(self) -> None:
        """Called once after last use."""

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint must keep so that `restore` continues exactly; JSON types only.

        Asked of trackers, which live in the driver. Rewards, filters and workflows live in several processes, and
        algorithms on every rank: what they remember is lost on a resume. Data keep their place in a `PromptStream`.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state. Called after `open`."""
