"""Base classes of algorithms: advantage, loss, and requirements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..errors import locate_in_class, one_line
from ..types import Role
from .base import Component, RecipeView

if TYPE_CHECKING:
    from torch import Tensor

    from .objective_inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of an algorithm besides a policy. Checked against the recipe before any process starts."""

    rewards: bool = True
    """Rewards, which score the samples."""
    engine: bool = True
    """A rollout engine, which samples completions."""
    reference: bool = False
    """The frozen model of `[reference]`, which scores `Role.REFERENCE`."""
    teacher: bool = False
    """The teacher of `[teacher]`, a frozen model or a server, which scores `Role.TEACHER`."""
    teacher_top_k: int = 0
    """K > 0: the teacher gives its K most likely tokens at each loss token (`LossInputs.teacher_top_logprobs`) instead
    of the log-probability of the token."""
    critic: bool = False
    """A value model that is trained together with the policy; for subclasses of `ActorCritic`."""
    groups: bool = False
    """Several rollouts per prompt, which are compared with each other."""
    greedy_baseline: bool = False
    """An extra rollout of each prompt at temperature 0. Its reward is the baseline; it is not trained on."""
    demonstrations: bool = False
    """Demonstrations instead of rollouts: prompts that include the text to learn (`Prompt.trained`)."""
    metadata: bool = False
    """`Sample.metadata` of all samples on every rank, for `AdvantageInputs.metadata` and `LossInputs.metadata`."""


Reduction = Literal["per-rollout", "per-token", "per-prompt", "constant"]


class Algorithm(Component, slot="algorithm"):
    """Advantage and loss of one algorithm, as pure functions of tensors that all trainers share."""

    reduction: Reduction = "per-rollout"
    """Reduction of the token losses of a step. ``per-rollout``: mean over the tokens of each rollout, then over
    rollouts. ``per-token``: mean over all tokens. ``per-prompt``: mean over the tokens of each prompt group, then over
    groups. ``constant``: sum divided by constant_length times the number of rollouts (Dr. GRPO)."""
    constant_length: int | None = Field(None, ge=1)
    """Divisor for reduction = "constant", in tokens, for example the maximum completion length."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.reduction == "constant" and self.constant_length is None:
            yield 'reduction = "constant" divides by constant_length; set it, for example to 1024'
        if self.reduction != "constant" and self.constant_length is not None:
            yield f'constant_length = {self.constant_length} has no effect; remove it or set reduction = "constant"'
        yield from self._find_method_errors()

    def _find_method_errors(self) -> Iterator[str]:
        """Yield errors if `needs` or `roles`, which every run calls, raises or returns a wrong type."""
        try:
            needs: object = self.needs()
            if not isinstance(needs, Needs):
                yield f"needs must return Needs, got {needs!r:.100}"
            roles: object = self.roles(steps=1)
            if not isinstance(roles, tuple) or not all(isinstance(role, Role) for role in roles):
                yield f"roles must return a tuple of Role, got {roles!r:.100}"
        except Exception as error:  # noqa: BLE001 - boundary: algorithms are users' code
            yield f"needs or roles raised {one_line(error)}{locate_in_class(type(self), error)}"

    @abstractmethod
    def needs(self) -> Needs:
        """Return the requirements of a run with these settings."""

    @abstractmethod
    def roles(self, *, steps: int) -> tuple[Role, ...]:
        """Return the roles to score per token before training on a batch with this number of optimizer steps."""

    @abstractmethod
    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the advantages of this rank's loss tokens, as [T]."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> TokenLoss:
        """Compute the unreduced per-token loss of one microbatch. Must support empty inputs (T = 0)."""

    def is_tokenwise(self) -> bool:
        """Return True if the loss of a token depends only on the inputs of that token, except ``kept``.

        False if the loss reads sums over samples, or log-probabilities of other tokens. If True, `loss` is also called
        with parts of samples: a trainer that fuses loss and gradient with the logits only has a part at a time.
        """
        return False

    def weights_need_entropy(self) -> bool:
        """Return True if the loss has an entropy term, so that the entropy needs a gradient."""
        return False

    def reads_rollout_logprobs(self) -> bool:
        """Return True if the algorithm uses the engine's log-probabilities as those of the behavior policy.

        The engine computes them before top-p, top-k and min-p. Recipes that use these settings then need an engine that
        reports the tokens left by them.
        """
        return False


class ActorCritic(Algorithm):
    """An algorithm with a critic, which is trained together with the policy, on the same microbatches and weights."""

    critic_warmup: int = Field(0, ge=0)
    """Number of batches at the start of the run that train only the critic."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if recipe is not None and self.critic_warmup >= recipe.batches:
            yield (
                f"algorithm.critic_warmup: must be less than run.batches = {recipe.batches}, got {self.critic_warmup}: "
                "no batch would train the policy"
            )

    @abstractmethod
    def returns(self, inputs: AdvantageInputs) -> Tensor:
        """Compute the value targets of this rank's loss tokens, as [T]. Called once per batch."""

    @abstractmethod
    def value_loss(self, inputs: ValueInputs) -> TokenLoss:
        """Compute the critic's unreduced per-token loss of one microbatch. Must support empty inputs (T = 0)."""
