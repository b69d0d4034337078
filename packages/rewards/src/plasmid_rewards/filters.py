"""Filters of groups by length, reward, duplicates, truncation and staleness, or by a function."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from plasmid import Filter, PromptGroup, RecipeView, Sample, StopReason
from plasmid.errors import one_line
from plasmid.plugins.functions import FunctionName
from pydantic import Field, field_validator


def select_finished(group: PromptGroup) -> list[Sample]:
    """Return the samples whose rollout did not fail. Only these are trained on."""
    return [sample for sample in group.samples if sample.stop_reason is not StopReason.ERROR]


def get_rewards(group: PromptGroup) -> NDArray[np.float64]:
    """Return the [n] rewards of the `select_finished`."""
    return np.array([sample.reward for sample in select_finished(group)], np.float64)


class MaxTruncated(Filter):
    """Keeps groups in which the length limit cut off at most a given fraction of the samples."""

    kind: Literal["max-truncated"] = "max-truncated"
    fraction: float = Field(0.5, ge=0, lt=1)
    """Maximum fraction of truncated samples in a kept group."""

    def __call__(self, group: PromptGroup) -> bool:
        samples = select_finished(group)
        cut = sum(sample.stop_reason is StopReason.LENGTH for sample in samples)
        return len(samples) > 0 and cut <= self.fraction * len(samples)


RUN = 3
"""Length of the token n-grams compared by `similarity`."""
Runs = frozenset[tuple[int, ...]]


class MaxDuplicates(Filter):
    """Keeps groups in which at most a given fraction of the samples are duplicates."""

    kind: Literal["max-duplicates"] = "max-duplicates"
    fraction: float = Field(0.5, ge=0, lt=1)
    """Maximum fraction of duplicates in a kept group. Among n equal samples, n - 1 are duplicates."""
    similarity: float = Field(1.0, gt=0, le=1)
    """Minimum similarity of a duplicate to another sample. 1 compares texts exactly, ignoring white space. Smaller
    values compare the Jaccard index of the samples' sets of 3-grams of generated tokens."""

    def __call__(self, group: PromptGroup) -> bool:
        samples = select_finished(group)
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


class LengthRange(Filter):
    """Keeps groups whose number of generated tokens lies in [min_tokens, max_tokens]."""

    kind: Literal["length-range"] = "length-range"
    min_tokens: int = Field(0, ge=0)
    """Minimum number of generated tokens."""
    max_tokens: int = Field(ge=1)
    """Maximum number of generated tokens."""
    of: Literal["mean", "shortest", "longest"] = "mean"
    """Length to compare: the mean of the group, its shortest sample or its longest sample."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.min_tokens > self.max_tokens:
            yield (
                f"min_tokens = {self.min_tokens} is above max_tokens = {self.max_tokens}; every group would be dropped"
            )

    def __call__(self, group: PromptGroup) -> bool:
        lengths = [sample.num_generated for sample in select_finished(group)]
        if not lengths:
            return False
        length = {"mean": float(np.mean(lengths)), "shortest": min(lengths), "longest": max(lengths)}[self.of]
        return self.min_tokens <= length <= self.max_tokens


class RewardRange(Filter):
    """Keeps groups whose mean reward lies in [low, high]."""

    kind: Literal["reward-range"] = "reward-range"
    low: float = Field(allow_inf_nan=False)
    """Minimum mean reward to keep."""
    high: float = Field(allow_inf_nan=False)
    """Maximum mean reward to keep."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.low > self.high:
            yield f"low = {self.low:g} is above high = {self.high:g}; every group would be dropped"

    def __call__(self, group: PromptGroup) -> bool:
        values = get_rewards(group)
        return len(values) > 0 and self.low <= float(values.mean()) <= self.high


class NonzeroSpread(Filter):
    """Keeps groups whose samples have different rewards. In all other groups every advantage is zero.

    This is the dynamic sampling of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476). A group with one sample
    (`samples_per_prompt` = 1) has no spread by definition and is kept; otherwise every group would be dropped.
    """

    kind: Literal["nonzero-spread"] = "nonzero-spread"
    tolerance: float = Field(1e-9, ge=0, allow_inf_nan=False)
    """Largest difference between the highest and lowest reward that still counts as zero."""

    def __call__(self, group: PromptGroup) -> bool:
        if len(group.samples) == 1:
            return True
        values = get_rewards(group)
        return len(values) > 1 and bool(np.ptp(values) > self.tolerance)


class Staleness(Filter):
    """Keeps groups whose oldest and newest tokens are at most `max_versions` policy versions apart.

    The filter runs when a group is finished, and a dropped group frees its slot at once. `run.max_staleness` applies at
    the time of training instead.
    """

    kind: Literal["staleness"] = "staleness"
    max_versions: int = Field(ge=0)
    """Maximum number of policy versions between the oldest and the newest token of a group."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if recipe is not None and self.max_versions >= recipe.max_staleness:
            yield (
                f"{recipe.key}.max_versions: {self.max_versions} has no effect with run.max_staleness = "
                f"{recipe.max_staleness}; lower it, or remove the filter"
            )

    def __call__(self, group: PromptGroup) -> bool:
        versions = [span.version for sample in group.samples for span in sample.versions]
        return not versions or max(versions) - min(versions) <= self.max_versions


class FunctionFilter(Filter):
    """Calls a Python function with the `PromptGroup`; the function returns True to keep the group.

    Dropped groups are counted under the function's name.
    """

    kind: Literal["function"] = "function"
    function: str
    """``module:function`` or ``file.py:function``. The file is imported in every process that filters."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments."""

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: str) -> str:
        try:
            FunctionName.parse(value).load()
        except ValueError:
            raise
        except Exception as error:  # boundary: importing runs users' code
            raise ValueError(f"{value} cannot be loaded: {one_line(error)}") from error
        return value

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        try:
            inspect.signature(FunctionName.parse(self.function).load()).bind(None, **self.arguments)
        except TypeError as error:
            yield f"arguments: {self.function} is called with (group) and {sorted(self.arguments)}: {error}"

    @property
    def reason(self) -> str:
        return FunctionName.parse(self.function).function

    def __call__(self, group: PromptGroup) -> bool:
        result = FunctionName.parse(self.function).load()(group, **self.arguments)
        if not isinstance(result, bool | np.bool_):
            raise TypeError(f"{self.function} must return True or False, got {result!r:.60}")
        return bool(result)
