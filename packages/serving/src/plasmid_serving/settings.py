"""Settings shared by engines on servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from plasmid.components import AdapterSpec, CanaryPlan, PlanRow, RecipeView, RolloutEngineConfig, Settings
from plasmid.errors import ConfigError
from plasmid.protocols import PauseMode
from plasmid.settings.validation import check
from plasmid.utils.addresses import validate_web_address
from pydantic import AfterValidator, Field

if TYPE_CHECKING:
    from plasmid.config.placement import PlacementConfig
    from plasmid.config.run import RunConfig


class ServerGroup(Settings):
    """A group of servers with additional arguments."""

    engines: int = Field(ge=1)
    """Number of servers."""
    server_args: Mapping[str, Any]
    """Arguments of these servers, in addition to `rollout.server_args`, which they override."""


class ServersConfig(RolloutEngineConfig):
    """Base class of settings of engines on servers. ``build`` calls `start.start_engine` with a `Dialect`."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV cache; ``auto`` is float32 on the CPU and bfloat16 on a GPU."""
    gpus_per_engine: int = Field(1, ge=1)
    """Number of GPUs per server, on one machine or evenly spread over several."""
    server_args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the servers."""
    groups: tuple[ServerGroup, ...] = ()
    """Groups of servers with different arguments; empty if all have the same. Requests and weights go to all groups."""
    urls: tuple[Annotated[str, AfterValidator(validate_web_address)], ...] = ()
    """URLs of external servers to use instead of starting servers. They must serve `model.path`."""
    api_key_env: str = ""
    """Environment variable with the API key of the servers at `urls`; empty for none. Servers that the run
    starts get a random key."""
    host: str = "auto"
    """Address that servers and router listen on. ``auto`` is the loopback address, or on a joined cluster the
    address by which its machines reach each other. Requests need a random key that only the run has; it is sent
    unencrypted."""
    max_requests: int = Field(256, ge=1)
    """Maximum number of open requests per rollout worker; further requests wait in the worker; those of the
    oldest rollouts are sent first."""
    pause_mode: PauseMode = "abort"
    """Treatment of running requests at a weight sync: they finish first (``wait``), are aborted and sent again
    with the tokens generated so far (``abort``), or are paused and continue under the new policy (``in_place``)."""
    recompute_kv: bool = True
    """With pause_mode = "in_place": recompute the KV cache of paused requests after a weight sync."""
    wire: Literal["auto", "ipc", "broadcast", "disk", "http"] = "auto"
    """Transport of weights: GPU memory shared by trainer and engine on one GPU (``ipc``), a broadcast over NCCL or
    gloo (``broadcast``), files in the run folder (``disk``), or downloads from the trainer (``http``). ``auto`` is
    ipc or broadcast on GPUs, disk on the CPU."""
    bucket_bytes: int = Field(256 << 20, ge=1 << 10)
    """Maximum size of a weight-sync bucket, in bytes; a larger tensor gets its own bucket."""
    read_back_every: int = Field(10, ge=0)
    """Interval, in weight syncs, at which the engine's own parameters are compared with what was sent. The first
    sync is always checked; 0 disables the check."""
    adapter_sync: Literal["auto", "adapter", "merged"] = "auto"
    """With `trainer.lora`: send only the adapter's matrices, which servers merge into copies of the base's weights in
    host memory (``adapter``), or all weights, merged by the trainer (``merged``). ``auto`` is adapter, but merged for
    servers at `urls` and with `placement.offload_engine`, because both lose their weights between syncs."""
    canary_tolerance: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    """Maximum mean difference between the log-probabilities of engine and trainer, in nats, on a completion that the
    engine samples after every sync; ``auto`` is 0.02 with dtype = "float32" and 0.25 otherwise."""
    health_interval_s: float = Field(5.0, gt=0.0)
    """Interval between health checks of each server, in seconds."""
    health_timeout_s: float = Field(20.0, gt=0.0)
    """Time limit for a server to answer a health check, in seconds."""
    health_failures: int = Field(3, ge=1)
    """Number of consecutive failed health checks after which a server is restarted."""
    max_restarts: int = Field(3, ge=0)
    """Maximum number of restarts per server. External servers are never restarted."""
    min_engines: int = Field(1, ge=1)
    """Minimum number of servers that serve or are being started; with fewer, the run ends with an error."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.pause_mode != "in_place" and not self.recompute_kv:
            yield 'recompute_kv: has no effect without pause_mode = "in_place"; remove it'
        if self.urls and self.server_args:
            yield "server_args: has no effect with urls, because the run starts no servers; remove the table"
        if self.urls and self.groups:
            yield "groups: has no effect with urls, because the run starts no servers; remove the tables"
        yield from self._group_errors(recipe)
        if self.api_key_env and not self.urls:
            yield "api_key_env: has no effect without urls, because servers of the run get a random key; remove it"
        if self.urls and self.wire not in ("auto", "disk"):
            yield f'wire: must be "disk" with urls, got {self.wire!r}; set "disk" or remove it'
        if self.urls and self.read_back_every:
            yield "read_back_every: must be 0 with urls, because parameters of these servers cannot be read"
        if self.urls and self.adapter_sync == "adapter":
            yield 'adapter_sync: must be "merged" with urls, whose servers load complete models; remove it'
        if recipe is not None:
            if self.adapter_sync != "auto" and not recipe.trains_adapter:
                yield (
                    f"rollout.adapter_sync: {self.adapter_sync!r} has no effect without an adapter (trainer.lora); "
                    "remove it"
                )
            yield from self._placement_errors(recipe.placement)

    def _group_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        """Yield errors of each group's settings that `server_args` alone does not have."""
        if recipe is None:
            for index, group in enumerate(self.groups):
                yield from (f"groups.{index}.{line}" for line in check(type(self), self._fields_of(group)).mistakes)
        elif self.groups:
            known = set(self.model_copy(update={"groups": ()}).find_errors(recipe))
            for index, group in enumerate(self.groups):
                lines = type(self)(**self._fields_of(group)).find_errors(recipe)
                yield from (f"rollout.groups.{index}: {line}" for line in lines if line not in known)

    def _fields_of(self, group: ServerGroup) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "groups"}
        return given | {"server_args": {**self.server_args, **group.server_args}}

    def _placement_errors(self, place: PlacementConfig) -> Iterator[str]:
        engines = len(self.urls) or place.engine_ranks // self.gpus_per_engine
        if not self.urls and place.engine_ranks % self.gpus_per_engine:
            yield (
                f"placement.engine_ranks: must be a multiple of rollout.gpus_per_engine = "
                f"{self.gpus_per_engine}, got {place.engine_ranks}"
            )
        if self.groups and (total := sum(group.engines for group in self.groups)) != engines:
            yield (
                f"rollout.groups: must have {engines} servers in total (placement.engine_ranks = {place.engine_ranks} "
                f"divided by rollout.gpus_per_engine = {self.gpus_per_engine}), got {total}"
            )
        yield from self._unread_placement(place) if self.urls else self._check_split(place)
        if self.min_engines > max(engines, 1):
            yield f"rollout.min_engines: {self.min_engines} is more than the number of engines, {engines}"
        if self.wire == "ipc" and not place.colocated:
            yield 'rollout.wire: "ipc" requires placement.colocated = true; set it or choose another wire'
        if self.wire == "broadcast" and place.colocated:
            yield 'rollout.wire: "broadcast" requires separate GPUs for trainer and engines; set "auto"'
        if self.adapter_sync == "adapter" and place.colocated and place.offload_engine is not False:
            yield (
                'rollout.adapter_sync: "adapter" requires servers that keep their weights; set '
                "placement.offload_engine = false, or remove it"
            )

    def _unread_placement(self, place: PlacementConfig) -> Iterator[str]:
        """Yield errors for rank settings, which servers at `urls` ignore because they have no ranks in the run."""
        for name, why in (
            ("engine_ranks", "servers at rollout.urls use no GPUs of the run"),
            ("colocated", "servers at rollout.urls share no GPUs with the trainer"),
            ("offload_engine", "the run does not manage the memory of servers at rollout.urls"),
            ("eval_ranks", "servers at rollout.urls cannot serve another version for evaluations"),
        ):
            if (value := getattr(place, name)) not in (type(place).model_fields[name].default, False):
                shown = str(value).lower() if isinstance(value, bool) else value
                yield f"placement.{name}: {shown} has no effect, because {why}; remove it"

    def _check_split(self, place: PlacementConfig) -> Iterator[str]:
        size = self.gpus_per_engine
        slots = place.slots(trainers=place.trainer_ranks, engines=place.engine_ranks, evals=place.eval_ranks)
        for nodes in (slots.nodes_of(slots.engine), slots.nodes_of(slots.evaluation)):
            for first in range(0, len(nodes) - size + 1, size):
                if why := self.split_error([len(list(own)) for _, own in groupby(nodes[first : first + size])]):
                    yield (
                        f"rollout.gpus_per_engine: {size} over placement.nodes = {place.nodes} puts an engine on "
                        f"{why}; choose other numbers of ranks"
                    )
                    return

    def of_server(self, index: int) -> Self:
        """Return the settings of one server: these, with the arguments of its group."""
        for group in self.groups:
            if index < group.engines:
                return type(self)(**self._fields_of(group))
            index -= group.engines
        return self

    def split_error(self, ranks: Sequence[int]) -> str:
        """Return why a server cannot have these numbers of ranks on its machines; empty if it can."""
        return ""

    def has_router(self) -> bool:
        """Return whether to put a router in front of the servers; the dialect is then a `RouterDialect`."""
        return False

    def takes_ranks(self) -> bool:
        """Return False for servers at `urls`, which take no ranks."""
        return not self.urls

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        """Yield the number of servers and of attention heads per GPU.

        Raises `ConfigError` if tensor parallelism cannot split the heads.
        """
        if self.urls:
            return
        split = self.tensor_parallel()
        yield "servers", str(ranks // self.gpus_per_engine), f"{ranks} engine ranks / {self.gpus_per_engine} of each"
        heads = model.get("num_attention_heads")
        if isinstance(heads, int) and split > 1:
            if heads % split:
                raise ConfigError(
                    f"rollout.gpus_per_engine: the model's num_attention_heads = {heads} cannot be split over {split} "
                    "GPUs"
                )
            yield "attention heads of a GPU", str(heads // split), f"{heads} over {split} GPUs of a server"

    def choose_sent_adapter(self, config: RunConfig, *, on_gpu: bool) -> AdapterSpec | None:
        """Return the adapter that weight syncs send alone; None if they send all weights."""
        loses_weights = self.urls or (on_gpu and config.placement.offload_engine)
        return None if self.adapter_sync == "merged" or loses_weights else config.trainer.adapter()

    def tensor_parallel(self) -> int:
        """Return the number of GPUs over which a server splits attention heads."""
        return self.gpus_per_engine

    def canary(self) -> CanaryPlan:
        """Check after every weight sync, because servers load weights with their own code."""
        usual = 0.02 if self.dtype == "float32" else 0.25
        return CanaryPlan(tolerance=usual if self.canary_tolerance == "auto" else self.canary_tolerance)

    def number_type(self, *, on_gpu: bool) -> str:
        """Return the data type of weights and KV cache."""
        return self.dtype if self.dtype != "auto" else "bfloat16" if on_gpu else "float32"
