"""Importance weights that correct for engines with different log-probabilities or older weights than the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from plasmid.components import RecipeView, Settings
from pydantic import Field

from .policy_loss import exp_difference

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """[T] each, without gradient."""

    weight: Tensor
    """Factor of the policy loss."""
    bounded: Tensor
    """bool: the weight is not the plain importance weight."""


class Correction(Settings):
    """How w, the trainer's over the engine's probability of a sampled token, becomes a factor of its policy loss."""

    mode: Literal["none", "truncate", "mask", "reject"] = "none"
    """Factor of the policy loss. none: w. truncate: min(w, high) (truncated importance sampling). mask: w within
    low..high, 0 outside (IcePop at level "token", masked importance sampling at the others). reject: 1 within
    low..high, 0 outside."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """token: w of each token. sequence: product of w over the tokens of the sample. geometric: their geometric mean."""
    low: float = Field(0.5, ge=0.0, allow_inf_nan=False)
    """mask, reject: lower bound of w."""
    high: float = Field(2.0, gt=0.0, allow_inf_nan=False)
    """truncate: maximum factor. mask, reject: upper bound of w."""
    veto: Literal["off"] | Annotated[float, Field(gt=0.0, lt=1.0)] = "off"
    """Threshold of the token veto: a sample gets factor 0 if w of any of its tokens is below it, for example 1e-4."""
    renormalize: bool = False
    """Divide the factors by their mean over the batch's tokens."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        unread = {"none": ("low", "high"), "truncate": ("low",)}.get(self.mode, ())
        for name in unread:
            if self._is_set(name):
                yield f"{name} = {getattr(self, name):g} has no effect with mode = {self.mode!r}; remove it"
        if self.mode in ("mask", "reject") and self.low >= self.high:
            yield f"low = {self.low:g} must be less than high = {self.high:g}"

    def is_tokenwise(self) -> bool:
        """Return True if the factor of a token depends on its own w only."""
        return self.level == "token" and self.veto == "off"

    def weights(self, log_ratio: Tensor, sample_index: Tensor, num_samples: int) -> Weights:
        """Compute the factor of each token from log w [T] of the whole samples of one rank.

        Truncation: Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl); IcePop: arXiv 2510.18855; masks of
        sequences: Liu et al. 2025 (https://richardli.xyz/rl-collapse).
        """
        log_ratio = log_ratio.detach()
        ratio = exp_difference(self._at_level(log_ratio, sample_index, num_samples))
        weight = ratio
        if self.mode == "truncate":
            weight = ratio.clamp(max=self.high)
        elif self.mode in ("mask", "reject"):
            inside = (ratio >= self.low) & (ratio <= self.high)
            weight = inside * (ratio if self.mode == "mask" else 1.0)
        if self.veto != "off":
            weight = weight * ~_any_below(self.veto, exp_difference(log_ratio), sample_index, num_samples)
        return Weights(weight=weight.to(log_ratio.dtype), bounded=weight != ratio)

    def _at_level(self, log_ratio: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
        if self.level == "token":
            return log_ratio
        zeros = log_ratio.new_zeros(num_samples)
        sums = zeros.index_add(0, sample_index, log_ratio)
        if self.level == "geometric":
            counts = zeros.index_add(0, sample_index, log_ratio.new_ones(log_ratio.shape))
            sums = sums / counts.clamp(min=1)
        return sums[sample_index]


def _any_below(limit: float, ratio: Tensor, sample_index: Tensor, num_samples: int) -> Tensor:
    """Return a mask [T]: True if any token of the same sample has a ratio below the limit."""
    below = (ratio < limit).to(ratio.dtype)
    return ratio.new_zeros(num_samples).index_add(0, sample_index, below)[sample_index] > 0
