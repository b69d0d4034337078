"""Which rank of a run goes to which machine and GPU, and how many CPU threads it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plasmid.config.placement import spread
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.protocols import Bundle, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The bundles of every part, in rank order."""

    trainer: tuple[Bundle, ...]
    engine: tuple[Bundle, ...]
    evaluation: tuple[Bundle, ...]
    """Of the engine for evaluation sets alone."""
    workers: tuple[Bundle, ...]
    """Of the rollout workers."""
    num_nodes: int
    is_on_policy: bool
    """On-policy, trainer and engine never compute at the same time."""

    @staticmethod
    def of(
        config: RunConfig, num_gpus: int, *, with_trainer: bool, with_engine: bool, with_eval: bool = False
    ) -> Layout:
        """Deal the ranks out; on GPUs if the recipe says so, or leaves it open and the cluster has any."""
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
        first, last = slots.first_engine, slots.first_engine + len(slots.engine)
        num_nodes = max(slots.nodes, default=0) + 1
        return Layout(
            trainer=tuple(bundles[: len(slots.trainer)]),
            engine=tuple(bundles[first:last]),
            evaluation=tuple(bundles[len(bundles) - len(slots.evaluation) :]),
            workers=tuple(Bundle(node) for node in spread(place.rollout_workers, num_nodes)) if with_engine else (),
            num_nodes=num_nodes,
            is_on_policy=config.run.max_staleness == 0,
        )

    def shares(self, threads: int) -> tuple[Share, ...]:
        """What each machine is asked for, if a rank takes so many CPUs; rollout workers take one."""
        ranks = {*self.trainer, *self.engine, *self.evaluation}
        return tuple(
            Share(
                gpus=sum(bundle.gpu is not None for bundle in ranks if bundle.node == node),
                cpus=max(1, self._busy(node) * threads + _on(node, self.workers)),
            )
            for node in range(self.num_nodes)
        )

    def threads(self, cores: Sequence[int]) -> int:
        """CPU threads of each rank, if the cores of the machines are shared out."""
        return max(1, min(count // max(1, self._busy(node)) for node, count in enumerate(cores)))

    def _busy(self, node: int) -> int:
        """Ranks that compute at the same time on one machine."""
        trainers, engines = _on(node, self.trainer), _on(node, self.engine)
        return _on(node, self.evaluation) + (max(trainers, engines) if self.is_on_policy else trainers + engines)


def check_gpus(shares: Sequence[Share], available: int) -> None:
    """Raises `ConfigError` if one machine with so many GPUs is not enough."""
    needed = sum(share.gpus for share in shares)
    if needed > available:
        raise ConfigError(
            f"placement: the ranks need {needed} GPUs, this machine has {available}; set fewer trainer_ranks and "
            'engine_ranks, colocated = true, or device = "cpu"'
        )


def _on(node: int, bundles: Sequence[Bundle]) -> int:
    return sum(bundle.node == node for bundle in bundles)
