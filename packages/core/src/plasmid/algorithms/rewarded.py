"""Algorithms whose advantages come from rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from .policy_gradient import PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import BatchTable
    from .inputs import AdvantageInputs


class Rewarded(PolicyGradient):
    """Base of algorithms with rewards, from which a KL to the reference model may be taken off."""

    reward_kl_coef: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the KL to the reference model that is taken off the reward; more than 0 keeps a reference model."""
    reward_kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """How the KL in the reward is estimated from the drawn tokens."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if not self.reward_kl_coef and self._is_set("reward_kl_estimator"):
            yield (
                f"reward_kl_estimator = {self.reward_kl_estimator!r} is never read, because there is no KL in the "
                "reward; remove it, or set reward_kl_coef"
            )

    @property
    def _has_reference(self) -> bool:
        return super()._has_reference or self.reward_kl_coef != 0

    @property
    def _reads_old_logprobs_early(self) -> bool:
        return super()._reads_old_logprobs_early or self.reward_kl_coef != 0

    def penalty(self, inputs: AdvantageInputs) -> Tensor | None:
        """[T] what the KL takes off the reward of each token; None without one."""
        from .reward_kl import token_kl

        if not self.reward_kl_coef:
            return None
        return self.reward_kl_coef * token_kl(inputs, self.reward_kl_estimator, old_policy=self.old_policy)

    def table(self, inputs: AdvantageInputs) -> BatchTable:
        """The batch with rewards less the KL of all tokens of each sample."""
        from .reward_kl import penalised_table

        return penalised_table(inputs, self.penalty(inputs))
