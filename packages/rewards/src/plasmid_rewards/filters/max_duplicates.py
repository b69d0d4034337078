"""Leaves out prompts whose samples mostly say the same."""

from __future__ import annotations

from typing import Literal

from plasmid import Filter, PromptGroup, Sample
from pydantic import Field

from .finished import finished

RUN = 3
"""Tokens of the runs that near-equal samples have in common."""
Runs = frozenset[tuple[int, ...]]


class MaxDuplicates(Filter):
    """Keeps groups of which at most a fraction of the samples repeats another one."""

    kind: Literal["max-duplicates"] = "max-duplicates"
    fraction: float = Field(0.5, ge=0, lt=1)
    """Largest fraction of repetitions to keep. Of n equal samples n - 1 are repetitions."""
    similarity: float = Field(1.0, gt=0, le=1)
    """From which similarity on a sample repeats another one: 1 takes equal texts, without regard to white space; less
    the share of runs of three generated tokens that two samples have in common (Jaccard's index)."""

    def __call__(self, group: PromptGroup) -> bool:
        samples = finished(group)
        repeats = self._num_near(samples) if self.similarity < 1 else self._num_equal(samples)
        return len(samples) > 0 and repeats <= self.fraction * len(samples)

    def _num_equal(self, samples: list[Sample]) -> int:
        return len(samples) - len({" ".join(sample.text.split()) for sample in samples})

    def _num_near(self, samples: list[Sample]) -> int:
        kept: list[Runs] = []
        for runs in map(_runs, samples):
            if not any(_similarity(runs, other) >= self.similarity for other in kept):
                kept.append(runs)
        return len(samples) - len(kept)


def _runs(sample: Sample) -> Runs:
    tokens = [int(token) for span in sample.versions for token in sample.token_ids[span.start : span.end]]
    return frozenset(zip(*(tokens[i:] for i in range(RUN)), strict=False)) or frozenset([tuple(tokens)])


def _similarity(left: Runs, right: Runs) -> float:
    common = len(left & right)
    return common / (len(left) + len(right) - common)
