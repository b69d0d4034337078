"""The plainest workflow: one prompt, one completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from plasmid.components import Rollout, Workflow
from plasmid.types import Prompt, Sample


class SingleTurn(Workflow):
    """One completion of the prompt."""

    kind: Literal["single-turn"] = "single-turn"

    async def run(self, rollout: Rollout, prompt: Prompt) -> Sequence[Sample]:
        completion = await rollout.generate(prompt.token_ids)
        return [rollout.sample(prompt, [completion])]
