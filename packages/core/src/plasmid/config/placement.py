"""``[placement]``: which part of a run computes where, and how its ranks are dealt out to several machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..components import Settings

Positive = Annotated[int, Field(ge=1)]

MAX_PROCESSES = 100_000
"""Most processes of one kind: a typing error beyond it would take all memory before anything could be said."""


class PlacementConfig(Settings):
    """``[placement]``: which part runs where."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What trainer and engines compute on; ``auto`` takes GPUs where the cluster has any when the run starts."""
    address: str = "auto"
    """Ray cluster to run on, by ``host:port`` of its head; ``auto`` is RAY_ADDRESS where that is set, as in jobs of
    ``ray job submit``, and else, as with ``local``, one of the run's own on this machine."""
    nodes: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Machines to use; ranks are dealt out to them evenly and in order, engines after the trainer."""
    trainer_ranks: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Processes of the trainer, one GPU each (on the CPU: one process each)."""
    engine_ranks: int = Field(1, ge=1, le=MAX_PROCESSES)
    """GPUs that all rollout engines have together (on the CPU: processes)."""
    colocated: bool = False
    """Trainer and engines share the same GPUs and take turns."""
    offload_trainer: bool = False
    """Move the trainer to host memory while the engine samples."""
    offload_engine: bool = False
    """Let the engine give up its GPU memory while the trainer trains."""
    eval_ranks: int = Field(0, ge=0, le=MAX_PROCESSES)
    """GPUs (on the CPU: processes) of an engine of their own for evaluation sets with mode = "engine"."""
    rollout_workers: int = Field(1, ge=1, le=MAX_PROCESSES)
    """Processes that run workflows, rewards and filters."""
    threads: Literal["auto"] | Positive = "auto"
    """CPU threads of each rank; ``auto`` shares the cores out."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest time for a process to come up."""
    wait_timeout_s: float = Field(600.0, gt=0)
    """Longest time until a cluster that the run did not start itself has `nodes` machines with enough GPUs and CPUs
    that nobody else holds."""

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address not in ("auto", "local"):
            check_address(address)
        return address

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if (self.offload_trainer or self.offload_engine) and not self.colocated:
            yield "offload_trainer and offload_engine make room for a colocated part; set colocated = true"

    def slots(self, *, trainers: int, engines: int, evals: int) -> Slots:
        """Where so many ranks go. Colocated ranks of trainer and engines share a slot."""
        first = 0 if self.colocated else trainers
        shared = max(trainers, first + engines)
        nodes = spread(shared + evals, self.nodes)
        return Slots(
            trainer=nodes[:trainers],
            engine=nodes[first : first + engines],
            evaluation=nodes[shared:],
            nodes=nodes,
            first_engine=first,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The machine of each rank; on GPUs, a slot is a GPU."""

    trainer: tuple[int, ...]
    engine: tuple[int, ...]
    evaluation: tuple[int, ...]
    nodes: tuple[int, ...]
    """Of each slot: those of the trainer, of the engines (unless they share them), of the evaluation engine."""
    first_engine: int
    """Slot of the engine's first rank."""


def spread(count: int, nodes: int) -> tuple[int, ...]:
    """The machine of each of ``count`` things, which lie side by side as evenly as they can."""
    used = min(nodes, count)
    return tuple(index * used // count for index in range(count))


def check_address(address: str) -> None:
    """Raises ValueError for what is no address of a Ray cluster that a driver could join."""
    if address.startswith(("http://", "https://")):
        raise ValueError(f"{address} is the page of a cluster, for `ray job submit`; a run needs host:port of its head")
    if address.startswith("ray://"):
        raise ValueError(
            f"{address} is for Ray's client, which a run cannot use; call rl on a machine of the cluster, or by "
            "`ray job submit`"
        )
    if not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):\d+", address):
        raise ValueError(f"must be 'auto', 'local' or host:port of a Ray cluster's head, got {address!r}")
