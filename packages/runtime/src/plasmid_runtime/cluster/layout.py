"""Assign the ranks of a run to machines and GPUs, and CPU threads to ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plasmid.config.placement import spread
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Bundle, Share
from plasmid.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Bundles of every part of a run, in rank order."""

    trainer: tuple[Bundle, ...]
    engine: tuple[Bundle, ...]
    evaluation: tuple[Bundle, ...]
    """Bundles of the separate evaluation engine."""
    roles: Mapping[Role, tuple[Bundle, ...]]
    """Bundles of the models on dedicated ranks."""
    workers: tuple[Bundle, ...]
    """Bundles of the rollout workers."""
    num_nodes: int
    is_on_policy: bool
    """True if trainer and engine never compute at the same time."""

    @staticmethod
    def of(
        config: RunConfig, num_gpus: int, *, with_trainer: bool, with_engine: bool, with_eval: bool = False
    ) -> Layout:
        """Assign all ranks, to GPUs if the recipe requires it, or with ``auto`` if the cluster has any."""
        place = config.placement
        slots = place.slots(
            trainers=place.trainer_ranks if with_trainer else 0,
            engines=config.engine_ranks if with_engine else 0,
            evals=place.eval_ranks if with_eval else 0,
        )
        on_gpu = place.device == "cuda" or (place.device == "auto" and num_gpus > 0)
        bundles = [
            Bundle(node, slot - slots.nodes.index(node) if on_gpu else None) for slot, node in enumerate(slots.nodes)
        ]
        num_nodes = max(slots.nodes, default=0) + 1
        return Layout(
            trainer=tuple(bundles[slot] for slot in slots.trainer),
            engine=tuple(bundles[slot] for slot in slots.engine),
            evaluation=tuple(bundles[slot] for slot in slots.evaluation),
            roles={role: tuple(bundles[slot] for slot in own) for role, own in slots.roles.items()},
            workers=tuple(Bundle(node) for node in spread(place.rollout_workers, num_nodes)) if with_engine else (),
            num_nodes=num_nodes,
            is_on_policy=config.run.max_staleness == 0,
        )

    @property
    def has_shared_gpus(self) -> bool:
        """True if the engine has GPUs of the trainer."""
        return any(bundle.gpu is not None and bundle in self.trainer for bundle in self.engine)

    def shares(self, threads: int) -> tuple[Share, ...]:
        """Return the resources to reserve on each machine: ``threads`` CPUs per rank and one per rollout worker."""
        ranks = {*self.trainer, *self.engine, *self.evaluation, *self._of_roles()}
        return tuple(
            Share(
                gpus=sum(bundle.gpu is not None for bundle in ranks if bundle.node == node),
                cpus=max(1, self._count_busy(node) * threads + _count_on(node, self.workers)),
            )
            for node in range(self.num_nodes)
        )

    def threads(self, cores: Sequence[int]) -> int:
        """Return the CPU threads per rank when the cores of the machines are divided among ranks."""
        return max(1, min(count // max(1, self._count_busy(node)) for node, count in enumerate(cores)))

    def _count_busy(self, node: int) -> int:
        """Return the number of ranks that compute at the same time on one machine."""
        trainers, engines = _count_on(node, self.trainer), _count_on(node, self.engine)
        trainers += _count_on(node, self._of_roles())  # these score while the trainer does
        return _count_on(node, self.evaluation) + (max(trainers, engines) if self.is_on_policy else trainers + engines)

    def _of_roles(self) -> tuple[Bundle, ...]:
        return tuple(bundle for bundles in self.roles.values() for bundle in bundles)


def check_gpus(shares: Sequence[Share], available: int) -> None:
    """Raise `ConfigError` if one machine with ``available`` GPUs is not enough."""
    needed = sum(share.gpus for share in shares)
    if needed > available:
        raise ConfigError(
            f"placement: the ranks need {needed} GPUs, but this machine has {available}; set fewer trainer_ranks and "
            'engine_ranks, colocated = true, or device = "cpu"'
        )


def _count_on(node: int, bundles: Sequence[Bundle]) -> int:
    return sum(bundle.node == node for bundle in bundles)
