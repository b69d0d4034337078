"""Scored groups as the driver and the trainers get them: in a store, with what the loop needs of them at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from ..utils.json_text import from_json, to_json
from .batch import GroupRef, Rows
from .samples import Prompt, PromptGroup, Sample, StopReason

if TYPE_CHECKING:
    from ..protocols import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalRef(Generic[T]):
    """Implements `protocols.Ref` by holding the value, with which it is pickled."""

    value: T

    def get(self) -> T:
        return self.value


class LocalStore:
    """Implements `protocols.Store` for one process."""

    def put(self, value: T) -> LocalRef[T]:
        """Hold a value."""
        return LocalRef(value)


def share(group: PromptGroup, store: Store, dropped_by: str = "") -> GroupRef:
    """Put a scored group into the store. Failed and greedy rollouts are in the whole group and no training rows."""
    good = [sample for sample in group.samples if sample.stop_reason is not StopReason.ERROR]
    rows = [sample for sample in good if not sample.is_baseline]
    greedy = [sample.reward for sample in good if sample.is_baseline]
    names = sorted({name for sample in rows if sample.score for name in sample.score.components})
    return GroupRef(
        id=group.id,
        prompt_id=group.prompt.id,
        source=group.prompt.source,
        sample_ids=tuple(sample.id for sample in rows),
        rollout_ids=tuple(sample.rollout_id for sample in rows),
        lengths=np.array([len(sample.token_ids) for sample in rows], np.int64),
        prompt_lengths=np.array([_num_given(sample, group.prompt) for sample in rows], np.int64),
        loss_tokens=np.array([int(sample.loss_mask.sum()) for sample in rows], np.int64),
        rewards=np.array([sample.reward for sample in rows], np.float64),
        components={
            name: np.array([s.score.components.get(name, np.nan) if s.score else np.nan for s in rows], np.float64)
            for name in names
        },
        truncated=np.array([sample.stop_reason is StopReason.LENGTH for sample in rows], np.bool_),
        errors=tuple(s.error or "" for s in group.samples if s.stop_reason is StopReason.ERROR),
        oldest_version=group.oldest_version,
        dropped_by=dropped_by,
        baseline=float(np.mean(greedy)) if greedy else None,
        rows=store.put(Rows.from_samples(rows) if rows else Rows.empty()),
        whole=store.put(replace(group, samples=tuple(_plain(sample) for sample in group.samples))),
    )


def _plain(sample: Sample) -> Sample:
    """Metadata as they will be stored: what a workflow put there may not be fit to travel to another process."""
    return replace(sample, metadata=from_json(to_json(sample.metadata))) if sample.metadata else sample


def _num_given(sample: Sample, prompt: Prompt) -> int:
    """Tokens before the first one that a policy drew. Workflows may show the policy another text than the prompt."""
    return min((span.start for span in sample.versions), default=prompt.num_given)
