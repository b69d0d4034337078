"""Ground truth as rewards need it. A prompt without it is the user's mistake, so it raises, unlike a sample's text."""

from __future__ import annotations

from plasmid.errors import RewardError
from plasmid.types import Prompt


def accepted_targets(prompt: Prompt, kind: str) -> list[object]:
    """The prompt's targets: one, or each item of a list. Raises `RewardError` if there is none."""
    targets = list(prompt.target) if isinstance(prompt.target, list | tuple) else [prompt.target]
    if not targets or any(target is None for target in targets):
        raise RewardError(
            f"{kind}: prompt {prompt.id} has no target to compare with; set data.target_key to its column"
        )
    return targets
