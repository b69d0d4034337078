"""Implement `protocols.Cluster` with Ray: processes, placement and shared values."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from plasmid.errors import ClusterError, DeadlineError, one_line
from plasmid.plugins.module_file import loaded_files
from plasmid.protocols import Actor, Node, ProcessState, Resources, Share, call
from plasmid.utils.addresses import ADDRESS, LOOPBACK
from plasmid.utils.waiting import run_together
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .connection import find_visible_gpus, join_ray, start_ray, warn_if_open
from .layout import check_gpus
from .node_agent import NodeAgent
from .process import ActorProcess, Machine, ProcessId, RayActor, RayStore, await_ref
from .watch.control_watch import ControlWatch
from .watch.daemons import RayDaemons
from .watch.inspection import SNAPSHOT_S, inspect_process
from .watch.machines import Machines
from .watch.ray_watch import RayWatch

log = logging.getLogger(__name__)
POLL_S = 1.0
LOG_INTERVAL_S = 30.0
"""Interval between log messages, in seconds."""


async def wait_for_placement_group(shares: Sequence[Share], *, within_s: float) -> PlacementGroup:
    """Reserve a placement group with one bundle per share, each on a separate machine. Raises `DeadlineError`."""
    bundles = [{"CPU": share.cpus, **({"GPU": share.gpus} if share.gpus else {})} for share in shares]
    group: PlacementGroup = placement_group(bundles, strategy="STRICT_SPREAD")
    start = time.monotonic()
    logged = start - LOG_INTERVAL_S
    try:
        while not await asyncio.to_thread(group.wait, POLL_S):
            now = time.monotonic()
            if now - start > within_s:
                raise DeadlineError(
                    f"placement: the Ray cluster did not provide the resources of the run within {within_s:g} s "
                    f"(placement.wait_timeout_s): {describe_request(shares)}; it has {describe_cluster()}; "
                    "add machines, wait for other jobs to end, or set fewer nodes or ranks"
                )
            if now - logged > LOG_INTERVAL_S:
                logged = now
                log.warning(
                    "waiting for the Ray cluster to provide %s; it has %s", describe_request(shares), describe_cluster()
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def bundle_addresses(group: PlacementGroup) -> list[str]:
    """Return the address of each bundle's machine."""
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [known[nodes[index]] for index in sorted(nodes)]


def describe_request(shares: Sequence[Share]) -> str:
    """Describe a request: ``2 machines with 4 GPUs and 5 CPUs each``."""
    found = []
    for share in dict.fromkeys(shares):
        count = sum(one == share for one in shares)
        what = _amounts(share.gpus, share.cpus)
        found.append(f"{count} machines with {what} each" if count > 1 else f"1 machine with {what}")
    return ", ".join(found)


def describe_cluster() -> str:
    """Describe the machines of the cluster, and the total of their free resources."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    each = sorted(f"{n['NodeManagerAddress']} with {_amounts(*_numbers(n['Resources']))}" for n in nodes)
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{', '.join(each) or 'no machine'}; free in total: {_amounts(*_numbers(free))}"


def _numbers(resources: dict[str, float]) -> tuple[float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0)


def _amounts(gpus: float, cpus: float) -> str:
    parts = [f"{gpus:g} GPU{'' if gpus == 1 else 's'}"] if gpus else []
    return " and ".join([*parts, f"{cpus:g} CPU{'' if cpus == 1 else 's'}"])


LOOPBACK_INTERFACE = "lo"
INSPECT_S = 5.0
"""Maximum time for a process's report, in seconds."""
OPEN_S = 120.0
"""Maximum time to start the first process on a machine, in seconds; Ray may have to unpack a job's folder there."""
ENVIRONMENT: Mapping[str, str] = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_ARENA_MAX": "2",
    "NCCL_CUMEM_ENABLE": "0",  # must be equal in all members of a broadcast, and the servers of engines set it to 0
}
"""Environment variables of every process."""
FORWARDED_PREFIXES = ("PLASMID_", "HF_", "TOKENIZERS_", "NCCL_", "GLOO_", "TORCH_")
"""Prefixes of environment variables forwarded to processes on a joined cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Location:
    """Scheduling options and environment for processes on one machine of the run."""

    node: Node
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for Ray's scheduler."""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SpawnedActor:
    """A started actor, its machine, and a Ray reference to its process id."""

    actor: RayActor
    location: _Location
    identity: Any

    async def stop(self) -> None:
        """Close and end the process. One that has not started yet is ended at once."""
        started, _ = ray.wait([self.identity], timeout=0)
        if started:
            await self.actor.stop()
        else:
            ray.kill(self.actor.handle)

    async def inspect(self) -> tuple[ProcessState, ...]:
        """Report what the process is doing: its own report, or that of the machine's agent if it does not respond.

        Processes of a server that it has started follow.
        """
        actor, agent, report = self.actor, self.location.node.agent, None
        try:
            process: ProcessId = await asyncio.wait_for(await_ref(self.identity), INSPECT_S)
        except (RayError, TimeoutError):
            return (ProcessState(name=actor.name, condition="not started, or has ended"),)
        with contextlib.suppress(RayError, TimeoutError):
            report = await asyncio.wait_for(await_ref(actor.handle.report.remote()), INSPECT_S)
        given = process.pid, Path(actor.log_file), report is None
        if agent is None or agent is actor:
            snapshot = await asyncio.to_thread(inspect_process, given[0], given[1], with_stacks=given[2])
        else:
            snapshot = await call(agent, INSPECT_S + SNAPSHOT_S, NodeAgent.inspect_process, *given)
        position = snapshot.position if report is None else report.position
        text = snapshot.text if report is None else f"{report.text}{snapshot.text}"
        own = ProcessState(
            name=actor.name, pid=process.pid, condition=snapshot.condition, position=position, stacks=text
        )
        return (own, *(replace(one, name=f"{actor.name}/{one.name}") for one in snapshot.servers))


class RayCluster:
    """Implements `protocols.Cluster`.

    Without an address, starts a private cluster on this machine. Otherwise joins the cluster at the address, or uses
    the one that this process is already connected to, and reserves the run's resources as one placement group.
    """

    def __init__(
        self, *, log_dir: Path, address: str | None = None, wait_s: float = 600.0, started: RayWatch | None = None
    ) -> None:
        """``started`` watches a private Ray that this process has started, and which the cluster owns from now on."""
        self._log_dir, self._folder = log_dir.absolute(), str(Path.cwd())
        self._wait_s = wait_s
        self._actors: list[_SpawnedActor] = []
        self._locations: tuple[_Location, ...] = ()
        self._group: PlacementGroup | None = None
        self._watch: RayWatch | None = started
        self._connected = started is not None or not ray.is_initialized()
        self._is_own = self._connected and address is None
        if self._is_own:
            self._watch = started or start_ray()
            self._watched: RayDaemons | Machines = RayDaemons(self._watch.folder)
        else:
            if self._connected and address is not None:
                join_ray(address)
            warn_if_open()
            self._watched = Machines(ray.get_runtime_context().gcs_address)
        self._control_watch = ControlWatch(self._watched.control_loss, self._stop_processes)

    @property
    def store(self) -> RayStore:
        return RayStore()

    @property
    def num_gpus(self) -> int:
        return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

    async def reserve(self, shares: Sequence[Share]) -> tuple[Node, ...]:
        if self._is_own:
            gpus = find_visible_gpus(self.num_gpus)
            check_gpus(shares, len(gpus))
            cores = len(os.sched_getaffinity(0))
            location = _Location(node=Node(address=LOOPBACK, cores=cores, gpus=gpus), env=_on_loopback())
            self._locations = (location,) * len(shares)
        else:
            os.environ[ADDRESS] = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._group = await wait_for_placement_group(shares, within_s=self._wait_s)
            addresses = bundle_addresses(self._group)
            assert isinstance(self._watched, Machines)
            self._watched.add(_raylet_ports(addresses))
            self._locations = tuple(await run_together(self._open(i, addresses[i], s) for i, s in enumerate(shares)))
        return tuple(location.node for location in self._locations)

    async def _open(self, index: int, address: str, share: Share) -> _Location:
        """Start the process that reserves the run's GPUs on one machine and runs its agent."""
        assert self._group is not None
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        location = _Location(
            node=Node(address=address, cores=1), options={"scheduling_strategy": strategy}, env=_forwarded_environment()
        )
        actor = self._spawn(f"node-{index}", location, {}, num_gpus=share.gpus)
        try:
            machine: Machine = await asyncio.wait_for(await_ref(actor.handle.machine.remote(address)), OPEN_S)
        except (RayError, TimeoutError) as error:
            raise ClusterError(
                f"node {address}: cannot start a process: {one_line(error)}; install plasmid-runtime in the Python "
                "environment of its `ray start`"
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
        for module in loaded_files():  # the process may not have imported them: send their classes with their code
            ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
        await actor.answer(actor.handle.make.remote(factory, args, kwargs), "start", timeout_s)
        return actor

    def _spawn(self, name: str, location: _Location, env: Mapping[str, str], *, num_gpus: int = 0) -> RayActor:
        """Request a process from Ray, without waiting for its start."""
        log_file = str(self._log_dir / f"{name}.log")
        options = {"num_cpus": 0, "num_gpus": num_gpus, "max_concurrency": 4096, **location.options}
        runtime = {"env_vars": {**ENVIRONMENT, **location.env, **env}}
        process: Any = ray.remote(ActorProcess)
        handle = process.options(**options, runtime_env=runtime).remote(name, log_file, self._folder)
        actor = RayActor(name=name, handle=handle, log_file=log_file)
        self._actors.append(_SpawnedActor(actor, location, handle.identify.remote()))
        return actor

    async def inspect(self) -> tuple[ProcessState, ...]:
        found = await asyncio.gather(*(one.inspect() for one in self._actors), return_exceptions=True)
        states: list[ProcessState] = []
        for one, result in zip(self._actors, found, strict=True):
            missing = (ProcessState(name=one.actor.name, condition="not responding"),)
            states += missing if isinstance(result, BaseException) else result
        return tuple(states)

    async def failure(self) -> str:
        return await self._watched.failure()

    async def close(self) -> None:
        is_lost = False
        try:
            is_lost = bool(await asyncio.to_thread(self._watched.control_loss))
            actors = reversed(self._actors)
            await asyncio.gather(*(one.actor.exit() if is_lost else one.stop() for one in actors))
        finally:  # a second Ctrl-C skips the wait, not the cleanup
            self._actors.clear()
            try:
                self._disconnect(is_lost=is_lost)
            finally:  # without this message, the watch assumes that the driver was killed
                if self._watch is not None:
                    self._watch.close()
                    self._watch = None

    def _disconnect(self, *, is_lost: bool) -> None:
        """Leave the cluster. If its control process is lost, requests to it would block for a minute."""
        if not self._is_own:
            os.environ.pop(ADDRESS, None)
        try:
            if self._group is not None and not is_lost:
                remove_placement_group(self._group)
        finally:
            self._group = None
            self._control_watch.close()
            if self._connected:
                ray.shutdown()

    def _stop_processes(self) -> None:
        """Stop the processes of the run from a thread, after the control process was lost."""
        if not self._is_own:  # otherwise the watch ends them with the driver

            async def stop() -> None:
                await asyncio.gather(*(one.actor.exit() for one in self._actors))

            asyncio.run(stop())


def _raylet_ports(addresses: Iterable[str]) -> dict[str, int]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    ports = {node["NodeManagerAddress"]: int(node["NodeManagerPort"]) for node in nodes if node["Alive"]}
    return {address: ports[address] for address in addresses if address in ports}


def _on_loopback() -> dict[str, str]:
    """Make gloo and NCCL of a run on one machine listen on the loopback interface, unless the user set another one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, LOOPBACK_INTERFACE) for name in names}


def _forwarded_environment() -> dict[str, str]:
    """Return the driver's environment variables for processes on other machines."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES) and name != ADDRESS
    }
