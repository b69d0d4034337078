"""Group relative policy optimization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..components import Needs
from .clipped import Clipped
from .rewarded import Rewarded

if TYPE_CHECKING:
    from torch import Tensor

    from .inputs import AdvantageInputs


class GroupRelative(Rewarded):
    """Base of algorithms whose advantages are rewards relative to their prompt group."""

    normalize_std: bool = True
    """Divide advantages by the standard deviation of their group; off in Dr. GRPO."""
    std_form: Literal["sample", "population", "leave-one-out"] = "sample"
    """Standard deviation with the divisor n - 1, with n, or, together with the mean, of the other rollouts alone; of
    fewer than two others, or equal ones, there is none and nothing is divided (NeMo-RL)."""
    std_eps: float = Field(1e-6, gt=0.0, allow_inf_nan=False)
    """Added to the standard deviation."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        for name, shown in (("std_eps", f"{self.std_eps:g}"), ("std_form", repr(self.std_form))):
            if not self.normalize_std and self._is_set(name):
                yield f"{name} = {shown} is never read with normalize_std = false; remove it"

    def needs(self) -> Needs:
        return replace(super().needs(), groups=True)

    def policy_advantages(self, inputs: AdvantageInputs) -> Tensor:
        import torch

        from .group import group_advantages

        values = group_advantages(
            self.table(inputs), normalize_std=self.normalize_std, std_eps=self.std_eps, std_form=self.std_form
        )
        return inputs.spread(torch.from_numpy(values))


class GRPO(GroupRelative, Clipped):
    """Rewards relative to their prompt group, PPO's clipped loss, and a KL to the reference model in the loss.

    Formula: A = (r - mean) / (std + std_eps) over the rollouts of the prompt; token loss
    max(-w A, -clip(w, 1 - clip_low, 1 + clip_high) A) with w = p / p_old; plus kl_coef KL(p || p_ref).
    Paper: Shao et al. 2024, arXiv 2402.03300
    Use: the default for verifiable rewards; several samples of each prompt, no critic.
    """

    kind: Literal["grpo"] = "grpo"
