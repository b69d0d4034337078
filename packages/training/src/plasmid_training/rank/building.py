"""Loading of all models that a rank trains or scores."""

from __future__ import annotations

from pathlib import Path

from plasmid.components import ActorCritic
from plasmid.config.run import RunConfig
from plasmid.errors import ModelError
from plasmid.types import Role
from plasmid_models.source import has_teacher, source, teacher_top

from ..batches.peers import PeerRanks
from .backend import RankBackend
from .frozen import FrozenModel, HostWeights, load_frozen
from .learner import Critic, Learner, TrainedModel


def build_learner(config: RunConfig, backend: RankBackend, peers: PeerRanks) -> Learner:
    """Load all models that the algorithm needs. The process groups must have been created. Raises `ModelError`."""
    run, algorithm, needs, dedicated = (
        config.run,
        config.algorithm,
        config.algorithm.needs(),
        config.placement.role_ranks,
    )
    warmup = algorithm.critic_warmup if isinstance(algorithm, ActorCritic) else 0
    policy = backend.build_policy(source(config, "model"))
    on_gpu, moves = peers.device.type == "cuda", bool(config.reference.update_every)
    frozen = {
        role: load_frozen(
            backend,
            source(config, role.value),
            policy,
            policy_path=Path(config.model.path),
            # on a CPU, swapping saves no memory and copies all fp32 weights six times per batch
            swap=on_gpu or (role is Role.REFERENCE and moves),
        )
        for role, needed in ((Role.REFERENCE, needs.reference), (Role.TEACHER, needs.teacher and has_teacher(config)))
        if needed and role not in dedicated
    }
    steps = max(0, run.batches - warmup) * run.steps_per_batch
    trained = TrainedModel(policy, algorithm=algorithm, peers=peers, total_steps=steps)
    has_critic = isinstance(algorithm, ActorCritic) and Role.CRITIC not in dedicated
    return Learner(
        policy=trained,
        critic=build_critic(config, backend, peers) if has_critic else None,
        critic_warmup=warmup,
        frozen=frozen,
        reference=_find_moving_reference(config, frozen.get(Role.REFERENCE)),
        reference_every=config.reference.update_every,
        teacher_top=teacher_top(needs, config.model.path),
        algorithm=algorithm,
        peers=peers,
        step_metrics=backend.step_metrics,
    )


def build_critic(config: RunConfig, backend: RankBackend, peers: PeerRanks) -> Critic:
    """Load the critic. The process groups must have been created. Raises `ModelError`."""
    assert isinstance(config.algorithm, ActorCritic), "only an `ActorCritic` has a critic"
    model, steps = backend.build_critic(source(config, "critic")), config.run.batches * config.run.steps_per_batch
    trained = TrainedModel(model, algorithm=config.algorithm, peers=peers, total_steps=steps)
    return Critic(trained=trained, algorithm=config.algorithm, peers=peers)


def _find_moving_reference(config: RunConfig, reference: FrozenModel | None) -> HostWeights | None:
    """Return the reference if `reference.update_every` is set. Raises `ModelError` if the policy cannot replace it."""
    if not config.reference.update_every or Role.REFERENCE in config.placement.role_ranks:
        return None
    if not isinstance(reference, HostWeights):
        raise reference_error(config)
    return reference


def reference_error(config: RunConfig) -> ModelError:
    """Return the error of a reference that the policy cannot replace."""
    return ModelError(
        f"reference.update_every: {config.reference.path} has a different architecture than the policy, which "
        "cannot replace it; remove update_every, or reference.path"
    )
