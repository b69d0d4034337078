"""Settings that engines on servers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

from plasmid.components import CanaryPlan, RolloutEngineConfig
from plasmid.protocols import PauseMode
from plasmid.utils.addresses import web_address
from pydantic import AfterValidator, Field

if TYPE_CHECKING:
    from plasmid.config.placement import PlacementConfig
    from plasmid.config.run import RunConfig


class ServersConfig(RolloutEngineConfig):
    """Base of the settings of an engine on servers; its ``build`` calls `start.start_engine` with a `Dialect`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of weights and KV cache; ``auto`` is float32 on the CPU and bfloat16 on a GPU."""
    gpus_per_engine: int = Field(1, ge=1)
    """GPUs of one server, on one machine or as many on each of several."""
    server_args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the servers."""
    router_args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the router; read with `router` only."""
    router: bool = False
    """Put a router in front; without, each rollout worker asks the server that has fewest of its requests."""
    urls: tuple[Annotated[str, AfterValidator(web_address)], ...] = ()
    """Servers that somebody else runs, in place of own ones. They must serve `model.path`."""
    api_key_env: str = ""
    """Environment variable with the API key of the servers at `urls`; empty for none. Own servers get a random key."""
    host: str = "auto"
    """Address that servers and router listen on; ``auto`` is the loopback, or in a cluster that the run has joined the
    one by which its machines reach each other. Requests need a random key that only the run has; it is sent without
    encryption."""
    max_requests: int = Field(256, ge=1)
    """Requests that each rollout worker has open at once; the others wait in it."""
    pause_mode: PauseMode = "abort"
    """What happens to running requests when new weights come: they end first (``wait``), are cut off and asked again
    with the tokens they have (``abort``), or are held and go on under the new policy (``in_place``)."""
    recompute_kv: bool = True
    """With pause_mode = "in_place": compute the KV cache of held requests anew after a weight sync."""
    wire: Literal["auto", "ipc", "broadcast", "disk", "http"] = "auto"
    """How weights travel: GPU memory shared by trainer and engine on one GPU (``ipc``), a broadcast by NCCL or gloo,
    files in the run's folder, or fetched from the trainer (``http``). ``auto`` is ipc or broadcast on GPUs, disk on
    the CPU."""
    bucket_bytes: int = Field(256 << 20, ge=1 << 10)
    """Largest bucket of weights in a weight sync; a larger tensor travels alone."""
    read_back_every: int = Field(10, ge=0)
    """Compare the engine's own parameters with what was sent in every k-th weight sync and the first; 0 for never."""
    canary_tolerance: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    """Largest mean difference of log-probabilities between engine and trainer on what the engine makes of a prompt
    after every sync; ``auto`` is 0.02 with dtype = "float32" and 0.25 otherwise."""
    health_interval_s: float = Field(5.0, gt=0.0)
    """Seconds between two looks at each server."""
    health_timeout_s: float = Field(20.0, gt=0.0)
    """Longest time for a server to answer a look."""
    health_failures: int = Field(3, ge=1)
    """Looks in a row that a server may fail before it is given up."""
    max_restarts: int = Field(3, ge=0)
    """Times that each server is started anew; external ones are never."""
    min_engines: int = Field(1, ge=1)
    """The run ends with an error when fewer servers than this serve or are being started."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.router_args and not self.router:
            yield "router_args: are never read without a router; remove the table or set router = true"
        if self.pause_mode != "in_place" and not self.recompute_kv:
            yield 'recompute_kv: is read with pause_mode = "in_place" only; remove it'
        if self.urls and self.server_args:
            yield "server_args: servers at urls are started by somebody else; remove the table"
        if self.api_key_env and not self.urls:
            yield "api_key_env: is read for servers at urls only; own servers get a random key; remove it"
        if self.urls and self.wire not in ("auto", "disk"):
            yield f'wire: servers at urls take weights from disk only, got {self.wire!r}; set "disk" or remove it'
        if self.urls and self.read_back_every:
            yield "read_back_every: parameters of servers at urls cannot be read; set it to 0"

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        """Validate against the rest of the recipe."""
        place = config.placement
        engines = len(self.urls) or place.engine_ranks // self.gpus_per_engine
        if not self.urls and place.engine_ranks % self.gpus_per_engine:
            yield (
                f"placement.engine_ranks: {place.engine_ranks} does not divide into engines of "
                f"rollout.gpus_per_engine = {self.gpus_per_engine}"
            )
        yield from self._unread_placement(place) if self.urls else self._check_split(place)
        if self.min_engines > max(engines, 1):
            yield f"rollout.min_engines: {self.min_engines} is more than the {engines} engines that are started"
        if self.wire == "ipc" and not place.colocated:
            yield 'rollout.wire: "ipc" shares the memory of one GPU; set placement.colocated = true or another wire'
        if self.wire == "broadcast" and place.colocated:
            yield 'rollout.wire: "broadcast" needs trainer and engines on GPUs of their own; set "auto"'

    def _unread_placement(self, place: PlacementConfig) -> Iterator[str]:
        """Servers at `urls` have no ranks in the run, so settings of ranks would be ignored."""
        for name, why in (
            ("engine_ranks", "servers at rollout.urls take no GPUs of the run"),
            ("colocated", "servers at rollout.urls share no GPUs with the trainer"),
            ("offload_engine", "the memory of servers at rollout.urls is not the run's"),
            ("eval_ranks", "servers at rollout.urls cannot hold another version for evaluations"),
        ):
            if (value := getattr(place, name)) != type(place).model_fields[name].default:
                shown = str(value).lower() if isinstance(value, bool) else value
                yield f"placement.{name}: {shown} is never read, {why}; remove it"

    def _check_split(self, place: PlacementConfig) -> Iterator[str]:
        size = self.gpus_per_engine
        slots = place.slots(trainers=place.trainer_ranks, engines=place.engine_ranks, evals=place.eval_ranks)
        for nodes in (slots.engine, slots.evaluation):
            for first in range(0, len(nodes) - size + 1, size):
                if why := self.split_error([len(list(own)) for _, own in groupby(nodes[first : first + size])]):
                    yield (
                        f"rollout.gpus_per_engine: {size} over placement.nodes = {place.nodes} makes an engine of "
                        f"{why}; choose other numbers of ranks"
                    )
                    return

    def split_error(self, ranks: Sequence[int]) -> str:
        """Why a server with so many ranks on each of its machines is impossible; empty if it is possible."""
        return ""

    def takes_ranks(self) -> bool:
        """Servers at `urls` take none."""
        return not self.urls

    def canary(self) -> CanaryPlan:
        """After each weight sync: servers load weights by code of their own."""
        usual = 0.02 if self.dtype == "float32" else 0.25
        return CanaryPlan(tolerance=usual if self.canary_tolerance == "auto" else self.canary_tolerance)

    def number_type(self, *, on_gpu: bool) -> str:
        """Number type of weights and cache."""
        return self.dtype if self.dtype != "auto" else "bfloat16" if on_gpu else "float32"
