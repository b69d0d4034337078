"""What a plugin subclasses to train by another method: advantage, loss, and what a run of it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..errors import one_line, place_in_class
from ..types import Role
from .base import Component

if TYPE_CHECKING:
    from torch import Tensor

    from .objective_inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run of one algorithm takes besides a policy. Checked against the recipe before anything starts."""

    rewards: bool = True
    """Scores of samples."""
    engine: bool = True
    """A rollout engine, which draws the samples."""
    reference: bool = False
    """The frozen model of `[reference]`, which scores `Role.REFERENCE`."""
    teacher: bool = False
    """The frozen model of `[teacher]`, which scores `Role.TEACHER`."""
    critic: bool = False
    """A value model that is trained beside the policy; for subclasses of `ActorCritic`."""
    groups: bool = False
    """Several rollouts of each prompt, because a rollout is compared with the others."""
    greedy_baseline: bool = False
    """One more rollout of each prompt at temperature 0, whose reward is the baseline; it is not trained on."""
    demonstrations: bool = False
    """Prompts that come with what the policy should have written (`Prompt.trained`), in place of rollouts."""
    metadata: bool = False
    """`Sample.metadata` of all samples on every rank, for `AdvantageInputs.metadata` and `LossInputs.metadata`."""


Reduction = Literal["per-rollout", "per-token", "per-prompt", "constant"]


class Algorithm(Component, slot="algorithm"):
    """Advantage and loss of one named method: pure functions of tensors that every trainer shares."""

    reduction: Reduction = "per-rollout"
    """How token losses of a step are averaged: tokens of each rollout, then rollouts; all tokens alike; tokens of each
    prompt group, then groups; or divided by constant_length times the number of rollouts (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens that reduction = "constant" divides by, for example the longest completion."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.reduction == "constant" and self.constant_length is None:
            yield 'reduction = "constant" divides by constant_length; set it, for example to 1024'
        if self.reduction != "constant" and self.constant_length is not None:
            yield f'constant_length = {self.constant_length} is never read; remove it or set reduction = "constant"'
        yield from self._broken_methods()

    def _broken_methods(self) -> Iterator[str]:
        """One line for each of `needs` and `roles` that raises or returns something else: every recipe asks them."""
        try:
            needs: object = self.needs()
            if not isinstance(needs, Needs):
                yield f"needs must return Needs, got {needs!r:.100}"
            roles: object = self.roles(steps=1)
            if not isinstance(roles, tuple) or not all(isinstance(role, Role) for role in roles):
                yield f"roles must return a tuple of Role, got {roles!r:.100}"
        except Exception as error:  # noqa: BLE001 - boundary: algorithms are users' code
            yield f"needs or roles raised {one_line(error)}{place_in_class(type(self), error)}"

    @abstractmethod
    def needs(self) -> Needs:
        """What a run with these settings takes."""

    @abstractmethod
    def roles(self, *, steps: int) -> tuple[Role, ...]:
        """Whose per-token scores must be taken before a batch is trained in this many optimizer steps."""

    @abstractmethod
    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """[T] advantage of each of this rank's loss tokens."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> TokenLoss:
        """Loss per token of one microbatch, not yet reduced. Must work without any token (T = 0)."""

    def weights_need_entropy(self) -> bool:
        """True if the loss has an entropy term, so that its gradient must be kept."""
        return False

    def reads_rollout_logprobs(self) -> bool:
        """True if the engine's log-probabilities count as those of what drew the tokens.

        They are taken before top-p, top-k and min-p. An engine that cannot tell what these left to draw from must then
        not be restricted by them.
        """
        return False


class ActorCritic(Algorithm):
    """An algorithm with a critic. The trainer trains it beside the policy, on the same microbatches and weights."""

    critic_warmup: int = Field(0, ge=0)
    """Batches at the start of the run in which the critic alone is trained."""

    @abstractmethod
    def returns(self, inputs: AdvantageInputs) -> Tensor:
        """[T] what the value of each of this rank's loss tokens is trained to be. Called once per batch."""

    @abstractmethod
    def value_loss(self, inputs: ValueInputs) -> TokenLoss:
        """Loss of the critic per token of one microbatch, not yet reduced. Must work without any token (T = 0)."""
