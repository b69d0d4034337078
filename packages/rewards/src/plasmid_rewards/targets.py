"""Access to targets. A prompt without a target is the user's mistake and raises, unlike a faulty sample."""

from __future__ import annotations

from plasmid.errors import RewardError
from plasmid.types import Prompt


def read_targets(prompt: Prompt, kind: str) -> list[object]:
    """Return the prompt's targets: one, or each item of a list. Raises `RewardError` if there is none."""
    targets = list(prompt.target) if isinstance(prompt.target, list | tuple) else [prompt.target]
    if not targets or any(target is None for target in targets):
        raise RewardError(f"{kind}: prompt {prompt.id} has no target; set data.target_key to the column of targets")
    return targets
