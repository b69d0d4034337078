"""Loads every model that a rank trains or scores."""

from __future__ import annotations

from pathlib import Path

from plasmid.components import ActorCritic
from plasmid.config.run import RunConfig
from plasmid.types import Role
from plasmid_models.source import source

from .backend import RankBackend
from .frozen import load_frozen
from .learner import Critic, Learner, TrainedModel
from .peers import PeerRanks


def build_learner(config: RunConfig, backend: RankBackend, peers: PeerRanks) -> Learner:
    """Load policy, critic and what the algorithm needs besides; the groups of ranks exist. Raises `ModelError`."""
    run, algorithm, needs = config.run, config.algorithm, config.algorithm.needs()
    warmup = algorithm.critic_warmup if isinstance(algorithm, ActorCritic) else 0
    policy = backend.build_policy(source(config, "model"))
    frozen = {
        role: load_frozen(backend, source(config, role.value), policy, policy_path=Path(config.model.path))
        for role, needed in ((Role.REFERENCE, needs.reference), (Role.TEACHER, needs.teacher))
        if needed
    }
    steps = max(0, run.batches - warmup) * run.steps_per_batch
    trained = TrainedModel(policy, algorithm=algorithm, peers=peers, total_steps=steps)
    critic = None
    if isinstance(algorithm, ActorCritic):
        values, steps = backend.build_critic(source(config, "critic")), run.batches * run.steps_per_batch
        of_critic = TrainedModel(values, algorithm=algorithm, peers=peers, total_steps=steps)
        critic = Critic(trained=of_critic, algorithm=algorithm, peers=peers)
    return Learner(
        policy=trained,
        critic=critic,
        critic_warmup=warmup,
        frozen=frozen,
        algorithm=algorithm,
        peers=peers,
        step_metrics=backend.step_metrics,
    )
