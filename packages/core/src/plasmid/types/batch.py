"""A scored batch, for the driver (ids, lengths, references) and for trainer ranks (flat arrays)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .kept_sets import KeptSet, join_kept
from .routing import Experts, join_experts
from .samples import Bools, Floats, Ints, PromptGroup, Sample
from .top_tokens import TopTokens, join_top_tokens

if TYPE_CHECKING:
    from ..protocols import Ref


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Samples as flat arrays: N samples, T tokens in total; sample i has the tokens ``offsets[i]:offsets[i + 1]``.

    Per-token arrays are aligned with the tokens: ``rollout_logprobs[t]`` is the log-probability of ``token_ids[t]``
    given the preceding tokens of its sample.
    """

    sample_ids: tuple[str, ...]
    offsets: NDArray[np.int64]
    """[N + 1]"""
    token_ids: Ints
    """[T]"""
    loss_mask: Bools
    """[T]"""
    rollout_logprobs: Floats
    """[T]; 0 on tokens that no policy generated."""
    versions: Ints
    """[T] policy version that generated the token; -1 for other tokens."""
    temperatures: Floats
    """[N] temperature of each sample's log-probabilities."""
    kept: KeptSet | None = None
    """T positions: the candidates of each token; None if no sample has any."""
    experts: Experts | None = None
    """[T, layers, choices] the experts that the engine chose for each token; None if no sample has any."""
    token_rewards: Floats | None = None
    """[T] reward earned at a loss token before the end of its sample (`Score.token_rewards`); NaN at tokens without
    one. None if no sample has any."""
    teacher_logprobs: Floats | None = None
    """[T] `Sample.teacher_logprobs`; NaN in samples without them. None if no sample has any."""
    teacher_top: TopTokens | None = None
    """The teacher's top tokens at the position of each loss token, in order. None if no sample has any."""

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, as [N]."""
        return np.diff(self.offsets)

    def loss_index(self) -> NDArray[np.int64]:
        """Return, as [T], the index of each loss token among the loss tokens; other tokens are undefined."""
        return np.cumsum(self.loss_mask) - 1

    def behaviour_logprobs(self, tokens: NDArray[np.int64]) -> Floats:
        """Return log-probabilities of these tokens by the behavior policy, normalized over their kept sets."""
        logprobs = self.rollout_logprobs[tokens]
        return logprobs if self.kept is None else logprobs - self.kept.log_mass[tokens]

    def select(self, indices: Sequence[int]) -> Rows:
        """Select samples, in the given order."""
        lengths = self.lengths()[list(indices)] if len(indices) else np.zeros(0, np.int64)
        spans = [np.arange(self.offsets[i], self.offsets[i + 1]) for i in indices]
        tokens = np.concatenate(spans) if spans else np.zeros(0, np.int64)
        loss_tokens = tokens[self.loss_mask[tokens]]
        return Rows(
            sample_ids=tuple(self.sample_ids[i] for i in indices),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            token_ids=self.token_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            rollout_logprobs=self.rollout_logprobs[tokens],
            versions=self.versions[tokens],
            temperatures=self.temperatures[list(indices)],
            kept=None if self.kept is None else self.kept.select(tokens),
            experts=None if self.experts is None else self.experts[tokens],
            token_rewards=None if self.token_rewards is None else self.token_rewards[tokens],
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[tokens],
            teacher_top=None if self.teacher_top is None else self.teacher_top.select(self.loss_index()[loss_tokens]),
        )

    @staticmethod
    def empty() -> Rows:
        """Create rows without samples."""
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
        """Concatenate the samples of all parts."""
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
            experts=join_experts([(part.experts, len(part.token_ids)) for part in parts]),
            token_rewards=_join_optional([(part.token_rewards, len(part.token_ids)) for part in parts]),
            teacher_logprobs=_join_optional([(part.teacher_logprobs, len(part.token_ids)) for part in parts]),
            teacher_top=join_top_tokens([(part.teacher_top, int(part.loss_mask.sum())) for part in parts]),
        )

    @staticmethod
    def from_samples(samples: Sequence[Sample]) -> Rows:
        """Flatten samples. Ranks share the arrays without copying."""
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
        experts=sample.experts,
        token_rewards=_token_rewards(sample),
        teacher_logprobs=None if sample.teacher_logprobs is None else np.asarray(sample.teacher_logprobs, np.float32),
        teacher_top=sample.teacher_top,
    )


def _token_rewards(sample: Sample) -> Floats | None:
    if not (turns := turn_rewards(sample)):
        return None
    values = np.full(len(sample.token_ids), np.nan, np.float32)
    values[list(turns)] = list(turns.values())
    return values


def _join_optional(parts: Sequence[tuple[Floats | None, int]]) -> Floats | None:
    """Concatenate parts, given with their numbers of tokens; NaN for parts without values, None if no part has any."""
    if all(values is None for values, _ in parts):
        return None
    return np.concatenate([np.full(n, np.nan, np.float32) if values is None else values for values, n in parts])


def turn_rewards(sample: Sample) -> dict[int, float]:
    """Return `Score.token_rewards` by loss token, in order: a reward of another token moves to the loss token before
    it, or to the first one."""
    found: dict[int, float] = {}
    given = sample.score.token_rewards if sample.score is not None else {}
    places = np.flatnonzero(sample.loss_mask) if given else np.zeros(0, np.int64)
    for position in sorted(given) if len(places) else ():
        place = int(places[max(int(np.searchsorted(places, position, side="right")) - 1, 0)])
        found[place] = found.get(place, 0.0) + given[position]
    return found


COUNTS = ("turns", "calls", "failed_calls")
"""Entries of a sample's metadata that are logged: turns of the policy, calls of tools, and those that failed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupRef:
    """The driver's view of a scored prompt group of n samples: numbers per sample, and references to the arrays."""

    id: int
    prompt_id: str
    sample_ids: tuple[str, ...]
    rollout_ids: tuple[str, ...]
    lengths: NDArray[np.int64]
    """[n] tokens of each sample, prompt included."""
    prompt_lengths: NDArray[np.int64]
    """[n] tokens of each sample before the first generated one."""
    loss_tokens: NDArray[np.int64]
    """[n] tokens of each sample in the loss."""
    rewards: NDArray[np.float64]
    """[n]"""
    components: dict[str, NDArray[np.float64]]
    """[n] each: reward components by name."""
    truncated: Bools
    """[n] True for samples that the length limit ended."""
    errors: tuple[str, ...]
    """Error texts of samples that failed."""
    oldest_version: int | None
    """Oldest policy version in the group; None if no token was generated."""
    dropped_by: str = ""
    """Reason of the filter that dropped the group; empty if it was kept."""
    source: str = ""
    """Name of the prompt's source in a mixture; empty where there is only one."""
    uses: int = 0
    """Batches that the group was trained in before this one."""
    baseline: float | None = None
    """Reward of the greedy rollout (`Needs.greedy_baseline`); None without one."""
    counts: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """[rollouts] each: counts of the workflow, by names of `COUNTS`; without the names that it does not count."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """[n] rewards of the turns of each sample (`Score.token_rewards`); empty if no sample has any."""
    shared_prefix: int = 0
    """Length of the common prefix of all samples, shorter than any of them; 0 for a single sample."""
    rows: Ref[Rows]
    whole: Ref[PromptGroup]

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids)

    def rollout_rewards(self) -> NDArray[np.float64]:
        """Return, as [rollouts], the mean reward over the samples of each rollout that did not fail."""
        index = {id_: i for i, id_ in enumerate(dict.fromkeys(self.rollout_ids))}
        rollouts = np.array([index[id_] for id_ in self.rollout_ids], np.int64)
        return np.bincount(rollouts, weights=self.rewards) / np.bincount(rollouts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchTable:
    """Table with one row per sample of a batch, identical on every rank: N samples, R rollouts, G groups.

    Ranks compute loss weights and group statistics from it, so neither depends on how samples are distributed.
    """

    sample_ids: tuple[str, ...]
    """[N] unique in the run."""
    group_index: NDArray[np.int64]
    """[N] index of each sample's prompt group: 0..G-1 in order of first occurrence."""
    rollout_index: NDArray[np.int64]
    """[N] index of each sample's rollout: 0..R-1 in order of first occurrence."""
    loss_tokens: NDArray[np.int64]
    """[N] tokens of each sample in the loss."""
    lengths: NDArray[np.int64]
    """[N] tokens of each sample, prompt included."""
    rewards: NDArray[np.float64]
    """[N] reward of each sample: the weighted sum of all rewards."""
    baselines: NDArray[np.float64] | None = None
    """[N] reward of the greedy rollout of each sample's prompt; None unless every group has one."""
    components: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """[N] each: the parts of the rewards by name (`Score.components`); NaN where a sample has none of that name."""
    turn_rewards: NDArray[np.float64] | None = None
    """[N, K] rewards of up to K turns of each sample, NaN after its last turn. Every sample has at least one turn; the
    last one also gets the rest of the sample's reward. None if no sample has rewards by turn."""
    policy_version: int = 0
    """Policy version when training on the batch starts; tokens of this version are on-policy."""
    shared_prefixes: NDArray[np.int64] | None = None
    """[N] `GroupRef.shared_prefix` of each sample's group; None if unknown."""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.sample_ids)

    @staticmethod
    def of(groups: Sequence[GroupRef], *, policy_version: int = 0) -> BatchTable:
        """Create the table of all samples of the groups, in order."""
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
            components=_join_components(groups),
            turn_rewards=_join_turns(groups),
            policy_version=policy_version,
            shared_prefixes=np.repeat(np.array([g.shared_prefix for g in groups], np.int64), counts),
        )


def _join_turns(groups: Sequence[GroupRef]) -> NDArray[np.float64] | None:
    turns = [own for g in groups for own in (g.turn_rewards or ((),) * g.num_samples)]
    if not any(turns):
        return None
    padded = np.full((len(turns), max(map(len, turns))), np.nan)
    padded[:, 0] = 0.0
    for row, own in zip(padded, turns, strict=True):
        row[: len(own)] = own
    return padded


def _join_components(groups: Sequence[GroupRef]) -> dict[str, NDArray[np.float64]]:
    names = sorted({name for group in groups for name in group.components})
    return {
        name: np.concatenate([g.components.get(name, np.full(g.num_samples, np.nan)) for g in groups]) for name in names
    }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRef:
    """A batch to score and train on. It contains references to tokens, not the tokens themselves."""

    index: int
    """Number of the batch in the run, from 0."""
    groups: tuple[GroupRef, ...]
    steps: int = 1
    """Number of optimizer steps; rollouts are split among them in order."""
    policy_version: int = 0
    """Policy version when training on the batch starts: number of weight publications since version 0."""

    def table(self) -> BatchTable:
        """Create the table of all samples."""
        return BatchTable.of(self.groups, policy_version=self.policy_version)
