"""A scored batch, as the driver sees it (ids, lengths, references) and as trainer ranks see it (flat arrays)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .kept_sets import KeptSet, join_kept
from .samples import Bools, Floats, Ints, PromptGroup, Sample

if TYPE_CHECKING:
    from ..protocols import Ref


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Samples as flat arrays: N samples, T tokens in all; sample i owns ``offsets[i]:offsets[i + 1]``.

    Every per-token array is aligned to the token that it speaks of: ``rollout_logprobs[t]`` is the log-probability of
    ``token_ids[t]`` given the tokens of its sample before it.
    """

    sample_ids: tuple[str, ...]
    offsets: NDArray[np.int64]
    """[N + 1]"""
    token_ids: Ints
    """[T]"""
    loss_mask: Bools
    """[T]"""
    rollout_logprobs: Floats
    """[T] 0 where no policy drew the token."""
    versions: Ints
    """[T] policy version that drew the token; -1 where none did."""
    temperatures: Floats
    """[N] what log-probabilities of each sample are taken at."""
    kept: KeptSet | None = None
    """T positions: what each token was drawn from; None if no sample has it."""

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def lengths(self) -> NDArray[np.int64]:
        """[N] tokens of each sample."""
        return np.diff(self.offsets)

    def behaviour_logprobs(self, tokens: NDArray[np.int64]) -> Floats:
        """Log-probabilities of what drew some of the T tokens: ``rollout_logprobs`` within their kept sets."""
        logprobs = self.rollout_logprobs[tokens]
        return logprobs if self.kept is None else logprobs - self.kept.log_mass[tokens]

    def select(self, indices: Sequence[int]) -> Rows:
        """The given samples, in the given order."""
        lengths = self.lengths()[list(indices)] if len(indices) else np.zeros(0, np.int64)
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in indices]
        tokens = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        return Rows(
            sample_ids=tuple(self.sample_ids[i] for i in indices),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            token_ids=self.token_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            rollout_logprobs=self.rollout_logprobs[tokens],
            versions=self.versions[tokens],
            temperatures=self.temperatures[list(indices)],
            kept=None if self.kept is None else self.kept.select(tokens),
        )

    @staticmethod
    def empty() -> Rows:
        """No samples."""
        return Rows(
            sample_ids=(),
            offsets=np.zeros(1, np.int64),
            token_ids=np.zeros(0, np.int32),
            loss_mask=np.zeros(0, np.bool_),
            rollout_logprobs=np.zeros(0, np.float32),
            versions=np.zeros(0, np.int32),
            temperatures=np.zeros(0, np.float32),
        )

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """All samples of the parts, part after part."""
        ends = np.concatenate([np.zeros(0, np.int64), *(part.lengths() for part in parts)])
        return Rows(
            sample_ids=tuple(id_ for part in parts for id_ in part.sample_ids),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(ends)]).astype(np.int64),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            loss_mask=np.concatenate([part.loss_mask for part in parts]),
            rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            temperatures=np.concatenate([part.temperatures for part in parts]),
            kept=join_kept([(part.kept, len(part.token_ids)) for part in parts]),
        )

    @staticmethod
    def from_samples(samples: Sequence[Sample]) -> Rows:
        """Flatten samples once; ranks then share the arrays without copying them."""
        return Rows.concat([_row(sample) for sample in samples])


def _row(sample: Sample) -> Rows:
    versions = np.full(len(sample.token_ids), -1, np.int32)
    for span in sample.versions:
        versions[span.start : span.end] = span.version
    return Rows(
        sample_ids=(sample.id,),
        offsets=np.array([0, len(sample.token_ids)], np.int64),
        token_ids=np.asarray(sample.token_ids, np.int32),
        loss_mask=np.asarray(sample.loss_mask, np.bool_),
        rollout_logprobs=np.asarray(sample.rollout_logprobs, np.float32),
        versions=versions,
        temperatures=np.array([sample.sampling.scoring_temperature], np.float32),
        kept=sample.kept,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRef:
    """What the driver keeps of a scored prompt group: numbers per sample, and where the arrays are. n samples."""

    id: int
    prompt_id: str
    sample_ids: tuple[str, ...]
    rollout_ids: tuple[str, ...]
    lengths: NDArray[np.int64]
    """[n] tokens of each sample, prompt included."""
    prompt_lengths: NDArray[np.int64]
    """[n] tokens of each sample before the first one that a policy drew."""
    loss_tokens: NDArray[np.int64]
    """[n] tokens that the loss sees."""
    rewards: NDArray[np.float64]
    """[n]"""
    components: dict[str, NDArray[np.float64]]
    """[n] each: reward components by name."""
    truncated: Bools
    """[n] True where the length limit ended the sample."""
    errors: tuple[str, ...]
    """Error texts of samples that failed."""
    oldest_version: int | None
    """Oldest policy version in the group; None if no token was drawn."""
    dropped_by: str = ""
    """Kind of the filter that dropped the group; empty if it is to be trained on."""
    source: str = ""
    """Name of the prompt's source in a mixture; empty where there is only one."""
    uses: int = 0
    """Batches that the group was trained in before this one."""
    baseline: float | None = None
    """Reward of the greedy rollout (`Needs.greedy_baseline`); None without one."""
    rows: Ref[Rows]
    whole: Ref[PromptGroup]

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTable:
    """What every rank knows of every sample of a batch: N samples, R rollouts, G groups. Small, the same everywhere.

    With it a rank computes loss weights and group statistics alone, so that neither depends on who holds which sample.
    """

    sample_ids: tuple[str, ...]
    """[N] unique in the run."""
    group_index: NDArray[np.int64]
    """[N] which prompt group each sample is of: 0..G-1 in order of first occurrence."""
    rollout_index: NDArray[np.int64]
    """[N] which rollout each sample is of: 0..R-1 in order of first occurrence."""
    loss_tokens: NDArray[np.int64]
    """[N] tokens of each sample that the loss sees."""
    lengths: NDArray[np.int64]
    """[N] tokens of each sample, prompt included."""
    rewards: NDArray[np.float64]
    """[N] reward of each sample: the weighted sum of all rewards."""
    baselines: NDArray[np.float64] | None = None
    """[N] reward of the greedy rollout of each sample's prompt; None unless every group has one."""
    components: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """[N] each: the parts of the rewards by name (`Score.components`); NaN where a sample has none of that name."""
    policy_version: int = 0
    """Version of the policy when training on the batch begins; tokens drawn by it are on-policy."""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.sample_ids)

    @staticmethod
    def of(groups: Sequence[GroupRef], *, policy_version: int = 0) -> BatchTable:
        """The table of all samples of the groups, group after group."""
        rollouts: dict[str, int] = {}
        index = [rollouts.setdefault(id_, len(rollouts)) for g in groups for id_ in g.rollout_ids]
        baselines = [g.baseline for g in groups if g.baseline is not None]
        counts = [g.num_samples for g in groups]
        return BatchTable(
            sample_ids=tuple(id_ for g in groups for id_ in g.sample_ids),
            group_index=np.repeat(np.arange(len(groups)), counts),
            rollout_index=np.array(index, np.int64),
            loss_tokens=np.concatenate([g.loss_tokens for g in groups]),
            lengths=np.concatenate([g.lengths for g in groups]),
            rewards=np.concatenate([g.rewards for g in groups]),
            baselines=np.repeat(np.array(baselines), counts) if groups and len(baselines) == len(groups) else None,
            components=_joined_components(groups),
            policy_version=policy_version,
        )


def _joined_components(groups: Sequence[GroupRef]) -> dict[str, NDArray[np.float64]]:
    names = sorted({name for group in groups for name in group.components})
    return {
        name: np.concatenate([g.components.get(name, np.full(g.num_samples, np.nan)) for g in groups]) for name in names
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRef:
    """One batch to score and train on. The driver holds no token of it."""

    index: int
    """Number of the batch in the run, from 0."""
    groups: tuple[GroupRef, ...]
    steps: int = 1
    """Optimizer steps to take on it; rollouts are dealt out to them in order."""
    policy_version: int = 0
    """Version of the policy when training on it begins: how often weights have been published since version 0."""

    def table(self) -> BatchTable:
        """What every rank is told of every sample."""
        return BatchTable.of(self.groups, policy_version=self.policy_version)
