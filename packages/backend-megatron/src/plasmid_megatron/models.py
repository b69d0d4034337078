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
from torch import Tensor

from .bridge import read_architecture
from .build import Network, build_language_model, build_value_model
from .critic import Critic
from .frozen import Frozen, load_frozen
from .layout import Ranks
from .learner import Learner
from .optimizer import Updater, wrap
from .settings import Megatron


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

    def trained(self) -> dict[str, Learner | Critic]:
        """By the name that a checkpoint has for each."""
        critic: dict[str, Learner | Critic] = {} if self.critic is None else {"critic": self.critic}
        return {"policy": self.learner, **critic}

    def offload(self) -> None:
        """Move everything that lies on the GPU to the host."""
        for model in self.trained().values():
            buffers = [b for chunk in model.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]  # type: ignore[misc]
            self._offloaded.out(_state(model))
            self._offloaded.out((buffer.grad_data for buffer in buffers), keep=False)
        gc.collect()
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloaded.back()


def _state(model: Learner | Critic) -> Iterator[Tensor]:
    for chunk in model.network.bare:
        yield from chunk.parameters()
        yield from chunk.buffers()
    for optimizer in model.updater.inner():
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def make_models(config: RunConfig, ranks: Ranks) -> Models:
    """Load policy, critic and what the algorithm needs besides; the groups of ranks exist. Raises `ModelError`."""
    settings, algorithm = config.trainer, config.algorithm
    assert isinstance(settings, Megatron), "built by another trainer's settings"
    of_policy = source(config, "model")
    policy = build_language_model(of_policy, read_architecture(of_policy, settings), settings, trained=True)
    frozen = _load_others(config, settings, policy)
    chunks = wrap(policy.bare, settings)
    critic = _make_critic(config, settings, algorithm, ranks) if isinstance(algorithm, ActorCritic) else None
    warmup = algorithm.critic_warmup if isinstance(algorithm, ActorCritic) else 0
    steps = max(0, config.run.batches - warmup) * config.run.steps_per_batch
    learner = Learner(
        network=policy,
        chunks=chunks,
        updater=Updater(settings, settings, chunks, total_steps=steps),
        algorithm=algorithm,
        ranks=ranks,
        settings=settings,
        frozen=frozen,
    )
    return Models(learner=learner, critic=critic, critic_warmup=warmup)


def _make_critic(config: RunConfig, settings: Megatron, algorithm: ActorCritic, ranks: Ranks) -> Critic:
    of_critic = source(config, "critic")
    network = build_value_model(of_critic, read_architecture(of_critic, settings), settings, seed=config.run.seed)
    chunks = wrap(network.bare, settings)
    total = config.run.batches * config.run.steps_per_batch
    return Critic(
        network=network,
        chunks=chunks,
        updater=Updater(settings, settings.critic, chunks, total_steps=total),
        algorithm=algorithm,
        ranks=ranks,
        settings=settings,
    )


def _load_others(config: RunConfig, settings: Megatron, policy: Network) -> dict[Role, Frozen]:
    needs = config.algorithm.needs()
    wanted = {Role.REFERENCE: needs.reference, Role.TEACHER: needs.teacher}
    return {
        role: load_frozen(source(config, role.value), policy, policy_path=Path(config.model.path), settings=settings)
        for role, needed in wanted.items()
        if needed
    }
