"""``[placement]``: devices, rank counts, and how ranks are distributed over machines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..components import RecipeView, Settings

Positive = Annotated[int, Field(ge=1)]

MAX_PROCESSES = 100_000
"""Maximum number of processes of one kind: a mistyped larger one would exhaust memory before validation reports it."""


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
    """Move the trainer to host memory while the engine samples; ``auto`` does if the GPUs have too little memory for
    both."""
    offload_engine: Literal["auto"] | bool = "auto"
    """Release the engine's GPU memory while the trainer trains; ``auto`` does if the GPUs have too little memory for
    both."""
    eval_ranks: int = Field(0, ge=0, le=MAX_PROCESSES)
    """GPUs (on the CPU: processes) of the separate engine for evaluation sets with mode = "engine"."""
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

    def slots(self, *, trainers: int, engines: int, evals: int) -> Slots:
        """Assign ranks to machines. Colocated ranks of trainer and engines share a slot."""
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
    """Machine of each slot, in the order trainer, engines (unless colocated), evaluation engine."""
    first_engine: int
    """Index of the slot of the first engine rank."""


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
