"""Put scored groups into the shared store, with a summary for the driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..utils.json_text import from_json, to_json
from .batch import COUNTS, GroupRef, Rows, turn_rewards
from .samples import Prompt, PromptGroup, Sample, StopReason

if TYPE_CHECKING:
    from ..protocols import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LocalRef(Generic[T]):
    """Implements `protocols.Ref` by containing the value, also when pickled."""

    value: T

    def get(self) -> T:
        return self.value


class LocalStore:
    """Implements `protocols.Store` for one process."""

    def put(self, value: T) -> LocalRef[T]:
        """Wrap a value in a reference."""
        return LocalRef(value)


def freeze_arrays(samples: Iterable[Sample]) -> None:
    """Make the arrays of samples read-only, because rewards, filters and the trainer share them."""
    for sample in samples:
        for array in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs):
            array.setflags(write=False)


def store_group(group: PromptGroup, store: Store, dropped_by: str = "") -> GroupRef:
    """Put a scored group into the store. Failed and greedy rollouts are part of ``whole`` but not of ``rows``."""
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
        counts=_counts(rows),
        turn_rewards=turns if any(turns := tuple(tuple(turn_rewards(s).values()) for s in rows)) else (),
        baseline=float(np.mean(greedy)) if greedy else None,
        shared_prefix=_shared_prefix(rows),
        rows=store.put(Rows.from_samples(rows) if rows else Rows.empty()),
        whole=store.put(replace(group, samples=tuple(_to_json_types(sample) for sample in group.samples))),
    )


def _counts(samples: Sequence[Sample]) -> dict[str, NDArray[np.float64]]:
    """Return the counts in the metadata of each rollout, by name of `COUNTS`."""
    rollouts = {sample.rollout_id: sample.metadata for sample in samples}.values()
    found = {name: [about[name] for about in rollouts if _is_count(about.get(name))] for name in COUNTS}
    return {name: np.array(values, np.float64) for name, values in found.items() if values}


def _is_count(value: object) -> bool:
    """Return True for a valid count. Metadata may come from an agent, so it can be any value."""
    return type(value) is int and 0 <= value < 1 << 53


def _shared_prefix(samples: Sequence[Sample]) -> int:
    """Return the length of the samples' common prefix, shorter than any sample; 0 for a single sample."""
    if len(samples) < 2:
        return 0
    longest = max(0, min(len(sample.token_ids) for sample in samples) - 1)
    firsts = np.stack([sample.token_ids[:longest] for sample in samples])
    differs = (firsts != firsts[0]).any(0)
    return int(differs.argmax()) if differs.any() else longest


def _to_json_types(sample: Sample) -> Sample:
    """Convert metadata to JSON types, as in the sample store: other values may not be picklable."""
    return replace(sample, metadata=from_json(to_json(sample.metadata))) if sample.metadata else sample


def _num_given(sample: Sample, prompt: Prompt) -> int:
    """Return the number of tokens before the first generated one, as workflows may change the prompt's text."""
    return min((span.start for span in sample.versions), default=prompt.num_given)
