"""Weights that correct for an engine whose log-probabilities are not the trainer's, or whose weights are older."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from plasmid.components import Settings
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
    """How the trainer's probability of a drawn token over the engine's, w, becomes a factor of its policy loss."""

    mode: Literal["none", "truncate", "mask", "reject"] = "none"
    """The factor: w; min(w, high) (truncated importance sampling); w within low..high and 0 outside (IcePop at level
    "token", masked importance sampling at the others); or 1 within low..high and 0 outside (rejection)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """w of a token alone, the product of all tokens of its sample, or their geometric mean."""
    low: float = Field(0.5, ge=0.0, allow_inf_nan=False)
    """mask, reject: smallest w that is kept."""
    high: float = Field(2.0, gt=0.0, allow_inf_nan=False)
    """truncate: largest factor. mask, reject: largest w that is kept."""
    veto: Literal["off"] | Annotated[float, Field(gt=0.0, lt=1.0)] = "off"
    """Drop a whole sample if w of any one of its tokens is below this, for example 1e-4."""
    renormalize: bool = False
    """Divide the factors by their mean over the batch's tokens."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        unread = {"none": ("low", "high"), "truncate": ("low",)}.get(self.mode, ())
        for name in unread:
            if self._is_set(name):
                yield f"{name} = {getattr(self, name):g} is never read with mode = {self.mode!r}; remove it"
        if self.mode in ("mask", "reject") and self.low >= self.high:
            yield f"low = {self.low:g} must be less than high = {self.high:g}"

    def weights(self, log_ratio: Tensor, sample_index: Tensor, num_samples: int) -> Weights:
        """Factors of tokens from log w [T] of each token; whole samples of one rank.

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
    """[T] bool: the ratio of some token of this token's sample is below the limit."""
    below = (ratio < limit).to(ratio.dtype)
    return ratio.new_zeros(num_samples).index_add(0, sample_index, below)[sample_index] > 0
