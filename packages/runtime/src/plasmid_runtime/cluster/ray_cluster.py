"""The cluster on Ray. Owns processes, placement and shared values."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from plasmid.errors import PlasmidError, one_line
from plasmid.protocols import Actor, Node, Resources, Share
from plasmid.utils.addresses import ADDRESS, LOOPBACK
from plasmid.utils.waiting import together
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .connection import join_ray, start_ray, visible_gpus, warn_if_open
from .layout import check_gpus
from .node_agent import NodeAgent
from .placement_group import bundle_addresses, wait_for_placement_group
from .process import ActorProcess, Machine, RayActor, RayStore, await_ref

LOOPBACK_INTERFACE = "lo"
OPEN_S = 120.0
"""Longest time for the first process on a machine, which may have to unpack a job's folder."""
ENVIRONMENT: Mapping[str, str] = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_ARENA_MAX": "2",
    "NCCL_CUMEM_ENABLE": "0",  # a broadcast to SGLang fails unless all members agree, and SGLang sets this
}
"""Of every process."""
FORWARDED_PREFIXES = ("PLASMID_", "HF_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH_")
"""Prefixes of environment variables forwarded to processes on a joined cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """Scheduling options and environment for processes on one machine of the run."""

    node: Node
    options: Mapping[str, Any] = field(default_factory=dict)
    """For Ray's scheduler."""
    env: Mapping[str, str] = field(default_factory=dict)


class RayCluster:
    """Implements `protocols.Cluster`.

    Without an address it starts a Ray of its own on this machine. It joins the cluster at an address, or the one that
    this process is connected to already, and takes of it what the run needs as one placement group.
    """

    def __init__(self, *, log_dir: Path, address: str | None = None, wait_s: float = 600.0) -> None:
        self._log_dir, self._folder = log_dir.absolute(), str(Path.cwd())
        self._wait_s = wait_s
        self._actors: list[RayActor] = []
        self._locations: tuple[_Location, ...] = ()
        self._group: PlacementGroup | None = None
        self._connected = not ray.is_initialized()
        self._is_own = self._connected and address is None
        if self._is_own:
            start_ray()
        elif self._connected and address is not None:
            join_ray(address)
        if not self._is_own:
            warn_if_open()

    @property
    def store(self) -> RayStore:
        return RayStore()

    @property
    def num_gpus(self) -> int:
        return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

    async def reserve(self, shares: Sequence[Share]) -> tuple[Node, ...]:
        if self._is_own:
            gpus = visible_gpus(self.num_gpus)
            check_gpus(shares, len(gpus))
            cores = len(os.sched_getaffinity(0))
            location = _Location(node=Node(address=LOOPBACK, cores=cores, gpus=gpus), env=_on_loopback())
            self._locations = (location,) * len(shares)
        else:
            os.environ[ADDRESS] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._group = await wait_for_placement_group(shares, within_s=self._wait_s)
            addresses = bundle_addresses(self._group)
            self._locations = tuple(await together(self._open(i, addresses[i], s) for i, s in enumerate(shares)))
        return tuple(location.node for location in self._locations)

    async def _open(self, index: int, address: str, share: Share) -> _Location:
        """Start the process that holds the run's GPUs on one machine and answers for it."""
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        location = _Location(
            node=Node(address=address, cores=1), options={"scheduling_strategy": strategy}, env=_forwarded_environment()
        )
        actor = self._spawn(f"node-{index}", location, {}, num_gpus=share.gpus)
        try:
            machine: Machine = await asyncio.wait_for(await_ref(actor.handle.machine.remote(address)), OPEN_S)
        except (RayError, TimeoutError) as error:
            raise PlasmidError(
                f"node {address}: no process could be started there: {one_line(error)}; is plasmid-runtime "
                "installed in the Python that `ray start` was called with?"
            ) from error
        await actor.answer(actor.handle.make.remote(NodeAgent, (), {}), "start", OPEN_S)
        env = {ADDRESS: address, **({"GLOO_SOCKET_IFNAME": machine.interface} if machine.interface else {})}
        node = Node(address=address, cores=machine.cores, gpus=machine.gpus, agent=actor)
        return _Location(node=node, options={"scheduling_strategy": strategy}, env=env | _forwarded_environment())

    async def start(
        self, factory: Any, /, *args: Any, name: str, resources: Resources, timeout_s: float = 120.0, **kwargs: Any
    ) -> Actor:
        location = self._locations[resources.bundles[0].node]
        gpus = [location.node.gpus[bundle.gpu] for bundle in resources.bundles if bundle.gpu is not None]
        actor = self._spawn(name, location, {**resources.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        await actor.answer(actor.handle.make.remote(factory, args, kwargs), "start", timeout_s)
        return actor

    def _spawn(self, name: str, location: _Location, env: Mapping[str, str], *, num_gpus: int = 0) -> RayActor:
        """Ask for a process; it comes up by itself."""
        log_file = str(self._log_dir / f"{name}.log")
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_concurrency": 4096, **location.options}
        runtime = {"env_vars": {**ENVIRONMENT, **location.env, **env}}
        process: Any = ray.remote(ActorProcess)
        handle = process.options(**options, runtime_env=runtime).remote(name, log_file, self._folder)
        actor = RayActor(name=name, handle=handle, log_file=log_file)
        self._actors.append(actor)
        return actor

    async def close(self) -> None:
        try:
            await asyncio.gather(*(actor.stop() for actor in reversed(self._actors)))
        finally:  # a second Ctrl-C ends the waiting, not the cleanup
            self._actors.clear()
            if self._group is not None:
                remove_placement_group(self._group)
                self._group = None
            if not self._is_own:
                os.environ.pop(ADDRESS, None)
            if self._connected:
                ray.shutdown()


def _on_loopback() -> dict[str, str]:
    """Where gloo and NCCL listen in a run on one machine, unless the user has said it: else it is the outer address."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, LOOPBACK_INTERFACE) for name in names}


def _forwarded_environment() -> dict[str, str]:
    """The driver's variables for processes on other machines."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES) and name != ADDRESS
    }
