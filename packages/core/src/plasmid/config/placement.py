"""``[placement]``: devices, rank counts, and how ranks are distributed over machines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from ..components import RecipeView, Settings, kind_of
from ..types import Role
from .loop import Positive

if TYPE_CHECKING:
    from .run import RunConfig

MAX_PROCESSES = 100_000
"""Maximum number of processes of one kind: a mistyped, larger number would exhaust memory before validation reports
it."""


class PlacementConfig(Settings):
    """``[placement]``: devices, and ranks of each part of the run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and engines; ``auto`` uses GPUs if the cluster has any when the run starts."""
    address: str = "auto"
    """Ray cluster to run on, as ``host:port`` of its head. ``auto`` uses RAY_ADDRESS if it is set, as in jobs started
    by ``ray job submit``; otherwise, and with ``local``, the run starts its own cluster on this machine."""
    nodes: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Number of machines; ranks are distributed over them evenly and in order, engine ranks after trainer ranks."""
    trainer_ranks: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Number of trainer processes, with one GPU each unless they run on the CPU."""
    engine_ranks: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Total number of GPUs for the rollout engines (on the CPU: number of processes)."""
    colocated: bool = False
    """Run trainer and engines on the same GPUs, in alternation."""
    offload_trainer: Literal["auto"] | bool = "auto"
    """Move the trainer to host memory while the engine samples; ``auto`` does so if the GPUs have too little memory
    for both."""
    offload_engine: Literal["auto"] | bool = "auto"
    """Release the engine's GPU memory while the trainer trains; ``auto`` does so if the GPUs have too little memory
    for both."""
    eval_ranks: int = Field(0, ge=0, le=MAX_PROCESSES)
    """GPUs (on the CPU: processes) of the separate engine for evaluation sets with mode = "engine"."""
    reference_ranks: int = Field(0, ge=0, le=MAX_PROCESSES)
    """GPUs (on the CPU: processes) dedicated to the reference, which then scores at the same time as the trainer; 0
    scores with the reference on the trainer's ranks."""
    teacher_ranks: int = Field(0, ge=0, le=MAX_PROCESSES)
    """GPUs (on the CPU: processes) dedicated to the teacher, which then scores at the same time as the trainer; 0
    scores with the teacher on the trainer's ranks."""
    critic_ranks: int = Field(0, ge=0, le=MAX_PROCESSES)
    """GPUs (on the CPU: processes) dedicated to the critic, which then scores and is trained at the same time as the
    policy; 0 trains the critic on the trainer's ranks."""
    rollout_workers: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Number of processes that run workflows, rewards and filters."""
    threads: Literal["auto"] | Positive = "auto"
    """CPU threads per rank; ``auto`` divides the cores among the ranks."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Maximum time for a process to start, in seconds."""
    wait_timeout_s: float = Field(600.0, gt=0)
    """Maximum time to wait for an existing cluster to have `nodes` machines with enough free GPUs and CPUs, in
    seconds."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address not in ("auto", "local"):
            check_address(address)
        return address

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if True in (self.offload_trainer, self.offload_engine) and not self.colocated:
            yield "offload_trainer and offload_engine have no effect without colocated = true; set it, or remove them"

    @property
    def role_ranks(self) -> Mapping[Role, int]:
        """Number of ranks of each model that does not share those of the trainer."""
        counts = {
            Role.REFERENCE: self.reference_ranks,
            Role.TEACHER: self.teacher_ranks,
            Role.CRITIC: self.critic_ranks,
        }
        return {role: count for role, count in counts.items() if count}

    def slots(self, *, trainers: int, engines: int, evals: int) -> Slots:
        """Assign ranks to machines. Colocated ranks of trainer and engines share a slot."""
        engine = range(0, engines) if self.colocated else range(trainers, trainers + engines)
        end = max(trainers, engine.stop)
        evaluation = range(end, end + evals)
        roles, end = {}, evaluation.stop
        for role, count in self.role_ranks.items() if trainers else ():
            roles[role] = range(end, end + count)
            end += count
        nodes = spread(end, self.nodes)
        return Slots(trainer=range(trainers), engine=engine, evaluation=evaluation, roles=roles, nodes=nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of each part of a run; on GPUs, a slot is a GPU."""

    trainer: range
    engine: range
    evaluation: range
    roles: Mapping[Role, range]
    """Slots of the models on dedicated ranks."""
    nodes: tuple[int, ...]
    """Machine of each slot, in the order trainer, engines (unless colocated), evaluation engine, roles."""

    def parts(self) -> Mapping[str, range]:
        """Return the slots of every part by its name, without empty parts."""
        named = {"trainer": self.trainer, "engine": self.engine, "evaluation engine": self.evaluation}
        named |= {role.value: slots for role, slots in self.roles.items()}
        return {name: slots for name, slots in named.items() if slots}

    def nodes_of(self, slots: range) -> tuple[int, ...]:
        """Return the machine of each of these slots."""
        return self.nodes[slots.start : slots.stop]


def find_placement_errors(config: RunConfig) -> Iterator[str]:
    """Yield errors in the numbers of machines and ranks."""
    place = config.placement
    slots = place.slots(trainers=place.trainer_ranks, engines=config.engine_ranks, evals=place.eval_ranks)
    if place.nodes > len(slots.nodes):
        yield (
            f"placement.nodes: must be at most the number of ranks, {len(slots.nodes)}, got {place.nodes}; lower "
            "it, or raise trainer_ranks or engine_ranks"
        )
    yield from _find_split_errors(config, "placement.trainer_ranks", place.trainer_ranks)
    for role, count in place.role_ranks.items():
        key = f"placement.{role.value}_ranks"
        if not _loads(config, role):
            kind = kind_of(config.algorithm)
            yield (
                f"{key}: {count} has no effect, because algorithm {kind!r} with these settings loads no {role.value}; "
                "remove it"
            )
        elif not config.trainer.places_roles():
            yield f"{key}: must be 0 with trainer {kind_of(config.trainer)!r}, which has no such ranks; remove it"
        else:
            yield from _find_split_errors(config, key, count)


def _loads(config: RunConfig, role: Role) -> bool:
    """Return True if a model is loaded for the role; a teacher that is a server is not."""
    needs = config.algorithm.needs()
    if role is Role.TEACHER:
        return needs.teacher and config.teacher is not None and config.teacher.model_path() is not None
    return needs.reference if role is Role.REFERENCE else needs.critic


def _find_split_errors(config: RunConfig, key: str, ranks: int) -> Iterator[str]:
    """Yield errors of batches that are split over this number of ranks."""
    per_step, parts = config.rollouts_per_batch // config.run.steps_per_batch, ranks
    try:
        parts = config.trainer.num_parts(ranks)
    except ValueError as error:
        yield f"{key}: {error}"
    if config.rollouts_per_batch % config.run.steps_per_batch == 0 and per_step < parts:
        yield (
            f"run.prompts_per_batch: {per_step} rollouts per step are fewer than {key} = {parts}; each rank needs at "
            "least one"
        )


def spread(count: int, nodes: int) -> tuple[int, ...]:
    """Distribute ``count`` items over machines in contiguous, even blocks; return the machine of each."""
    used = min(nodes, count)
    return tuple(index * used // count for index in range(count))


def check_address(address: str) -> None:
    """Raise ValueError unless a driver can join a Ray cluster at this address."""
    if address.startswith(("http://", "https://")):
        raise ValueError(f"{address} is a Ray dashboard, for `ray job submit`; set host:port of the cluster's head")
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is a Ray Client address, which is not supported; call rl on a machine of the cluster, or "
            "through `ray job submit`"
        )
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):\d+", address):
        raise ValueError(f"must be 'auto', 'local' or host:port of a Ray cluster's head, got {address!r}")
