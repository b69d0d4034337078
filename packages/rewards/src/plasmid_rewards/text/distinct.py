"""Do the samples of a prompt say different things?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from plasmid import Prompt, Reward, Sample


class Distinct(Reward):
    """1.0 for a text that no other sample of the prompt has, 1/n for one that n samples have. Against collapse."""

    kind: Literal["distinct"] = "distinct"
    ignore_case: bool = False
    """Compare without regard to upper and lower case; white space never counts."""

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        return 1.0

    async def score_group(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[float]:
        texts = [" ".join(sample.text.split()) for sample in samples]
        texts = [text.casefold() for text in texts] if self.ignore_case else texts
        counts = Counter(texts)
        return [1.0 / counts[text] for text in texts]
