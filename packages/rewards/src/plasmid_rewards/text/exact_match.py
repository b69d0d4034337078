"""Does the text say the target?"""

from __future__ import annotations

from typing import ClassVar, Literal

from plasmid import Prompt, Reward, Sample

from ..targets import accepted_targets


class ExactMatch(Reward):
    """1.0 if the text is the target (or one of a list of targets), else 0.0."""

    kind: Literal["exact-match"] = "exact-match"
    reads_target: ClassVar[bool] = True
    where: Literal["whole", "start", "end", "anywhere"] = "whole"
    """Where in the text the target must stand; ``whole`` allows nothing else."""
    strip: bool = True
    """Ignore white space around text and target."""
    ignore_case: bool = False
    """Compare without regard to upper and lower case."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        text = self._plain(sample.text)
        return float(
            any(self._matches(text, self._plain(str(target))) for target in accepted_targets(prompt, self.kind))
        )

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text

    def _matches(self, text: str, target: str) -> bool:
        if self.where == "whole" or not target:  # an empty target stands everywhere: that would reward any text
            return text == target
        if self.where == "start":
            return text.startswith(target)
        return text.endswith(target) if self.where == "end" else target in text
