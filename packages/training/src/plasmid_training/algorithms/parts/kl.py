"""Per-token estimators of KL(policy || base) from one sample (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .policy_loss import LIMIT

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]


def kl_estimate(
    estimator: KLEstimator, logprobs: Tensor, base_logprobs: Tensor, *, importance: Tensor | None = None
) -> Tensor:
    """Return the estimate [T] of each token, with d = logprobs - base_logprobs of the sampled tokens.

    k1: d (unbiased value; the expected gradient as a loss is 0). k2: d^2 / 2 (its expected gradient is that of the KL).
    k3: e^-d - 1 + d (unbiased value, never negative), with d clamped to at least -LIMIT, below which the gradient is 0.
    low_var_kl: k3 clamped to +-10. k1 and k2 are not clamped.

    ``importance`` [T], the probability ratio of the policy to the one that sampled the tokens, multiplies the estimate
    before the clamp; with its gradient the estimate's gradient is unbiased, too (DeepSeek-V3.2, arXiv 2512.02556).
    """
    d = logprobs - base_logprobs
    if estimator == "k1":
        value = d
    elif estimator == "k2":
        value = d * d / 2
    else:
        d = d.clamp(min=-LIMIT)  # in both terms: clamping the exponent alone would leave the gradient +1 of the other
        value = (-d).exp() - 1 + d
    if importance is not None:
        value = value * importance
    return value.clamp(-10.0, 10.0) if estimator == "low_var_kl" else value
