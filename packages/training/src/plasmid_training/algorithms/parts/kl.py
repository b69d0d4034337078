"""Per-token estimators of KL(policy || base) from one drawn token (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .policy_loss import LIMIT

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]


def kl_estimate(
    estimator: KLEstimator, logprobs: Tensor, base_logprobs: Tensor, *, importance: Tensor | None = None
) -> Tensor:
    """[T] estimate per token, with d = logprobs - base_logprobs of the drawn tokens.

    k1: d (unbiased value; as a loss its gradient is 0 on average). k2: d^2 / 2 (gradient of the KL on average).
    k3: e^-d - 1 + d (unbiased value, never negative), with d at least -LIMIT: tokens below it keep k3's value there and
    have gradient 0. low_var_kl: k3 clamped to +-10. k1 and k2 are exact for every d.
    ``importance`` [T], the ratio of the policy to the one that drew the tokens, multiplies the estimate before the
    clamp; with its gradient the estimate's gradient is unbiased, too (DeepSeek-V3.2, arXiv 2512.02556).
    """
    d = logprobs - base_logprobs
    if estimator == "k1":
        value = d
    elif estimator == "k2":
        value = d * d / 2
    else:
        d = d.clamp(min=-LIMIT)  # in both terms: a clamp of the exponent alone would leave the gradient +1 of the other
        value = (-d).exp() - 1 + d
    if importance is not None:
        value = value * importance
    return value.clamp(-10.0, 10.0) if estimator == "low_var_kl" else value
