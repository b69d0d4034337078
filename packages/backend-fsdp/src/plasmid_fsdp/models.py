"""All models of one rank: the policy, the critic if the algorithm has one, and what the two have in common."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from plasmid.components import ActorCritic
from plasmid.config.run import RunConfig
from plasmid.types import Role
from plasmid.types.batch import Rows
from plasmid_models.source import source
from plasmid_training.batches.rank_batch import RankBatch
from plasmid_training.objective.actor_critic import StepReports, score_role, train_both
from plasmid_training.objective.objective import RoleScores
from plasmid_training.offload import Offloaded
from torch import Tensor, nn
from torch.optim import Optimizer

from .critic import Critic
from .frozen import Frozen, load_frozen
from .learner import Learner
from .model import Policy, build_policy
from .optimizer import Updater
from .ranks import Ranks
from .settings import FSDP
from .state import CRITIC
from .value_model import build_value_model
from .weights import local, named_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Models:
    """One rank's part of every model. All ranks call every method together."""

    learner: Learner
    critic: Critic | None
    critic_warmup: int
    """Batches at the start of the run in which the critic alone is trained."""
    _offloaded: Offloaded = field(default_factory=Offloaded)

    def score(self, batch: RankBatch, rows: Rows, roles: Sequence[Role]) -> dict[Role, Tensor]:
        """[T] scores of the rank's loss tokens by role; 0 at other tokens."""
        return {role: score_role(self.learner, self.critic, batch, rows, role) for role in roles}

    def train(self, batch: RankBatch, rows: Rows, scores: RoleScores) -> StepReports:
        """Metrics of every optimizer step: the policy's, the critic's, or both."""
        step = self.learner.updater.step
        return train_both(self.learner, self.critic, batch, rows, scores, warmup=self.critic_warmup, step=step)

    def weights(self) -> dict[str, Tensor]:
        """Every trained model's weights by the name that a checkpoint has for them."""
        critic = {} if self.critic is None else self.critic.model.named()
        return named_weights(self.learner.policy.lm) | {CRITIC + name: tensor for name, tensor in critic.items()}

    def optimizers(self) -> list[Optimizer]:
        """The policy's, then the critic's."""
        return [updater.optimizer for updater in self.updaters().values()]

    def updaters(self) -> dict[str, Updater]:
        """By the name that a checkpoint has for their steps."""
        critic = {} if self.critic is None else {"critic_step": self.critic.updater}
        return {"step": self.learner.updater} | critic

    def offload(self) -> None:
        """Move everything that lies on the GPU to the host, and give up its memory."""
        self._offloaded.out(self._state())
        gc.collect()
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.back()

    def _state(self) -> Iterator[Tensor]:
        trained: list[nn.Module] = [self.learner.policy] + ([] if self.critic is None else [self.critic.model])
        for model in trained:
            yield from (local(tensor) for tensor in (*model.parameters(), *model.buffers()))
        for optimizer in self.optimizers():
            for state in optimizer.state.values():
                yield from (local(value) for value in state.values() if isinstance(value, Tensor))


def make_models(config: RunConfig, ranks: Ranks) -> Models:
    """Load policy, critic and what the algorithm needs besides; the process group exists. Raises `ModelError`."""
    settings, algorithm = config.trainer, config.algorithm
    assert isinstance(settings, FSDP), "built by another trainer's settings"
    policy = build_policy(settings, source(config, "model"), device=ranks.device, shard=ranks.shard)
    critic = _make_critic(config, settings, algorithm, ranks) if isinstance(algorithm, ActorCritic) else None
    warmup = algorithm.critic_warmup if isinstance(algorithm, ActorCritic) else 0
    learner = Learner(
        policy=policy,
        updater=Updater(
            settings,
            list(policy.lm.parameters()),
            total_steps=max(0, config.run.batches - warmup) * config.run.steps_per_batch,
            device=ranks.device,
            all_reduce=ranks.all_reduce,
        ),
        algorithm=algorithm,
        ranks=ranks,
        frozen=_load_others(config, settings, policy, ranks),
    )
    return Models(learner=learner, critic=critic, critic_warmup=warmup)


def _make_critic(config: RunConfig, settings: FSDP, algorithm: ActorCritic, ranks: Ranks) -> Critic:
    model = build_value_model(
        settings, source(config, "critic"), device=ranks.device, shard=ranks.shard, seed=config.run.seed
    )
    updater = Updater(
        settings.critic,
        list(model.parameters()),
        total_steps=config.run.batches * config.run.steps_per_batch,
        device=ranks.device,
        all_reduce=ranks.all_reduce,
    )
    return Critic(model=model, updater=updater, algorithm=algorithm, ranks=ranks)


def _load_others(config: RunConfig, settings: FSDP, policy: Policy, ranks: Ranks) -> dict[Role, Frozen]:
    needs = config.algorithm.needs()
    wanted = {Role.REFERENCE: needs.reference, Role.TEACHER: needs.teacher}
    return {
        role: load_frozen(
            source(config, role.value),
            policy,
            policy_path=Path(config.model.path),
            settings=settings,
            device=ranks.device,
            shard=ranks.shard,
        )
        for role, needed in wanted.items()
        if needed
    }
