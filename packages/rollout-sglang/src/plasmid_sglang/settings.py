"""Settings of the SGLang engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from plasmid.components import BuildContext, CanaryPlan, PlanRow, RolloutEngineConfig
from plasmid.errors import ConfigError
from plasmid.protocols import PauseMode, RolloutEngine
from plasmid.urls import web_address
from pydantic import AfterValidator, Field, field_validator

from .exactness import exact_mistakes
from .followers import uneven
from .schema import knows, mistakes

if TYPE_CHECKING:
    from plasmid.config import RunConfig
    from plasmid.placement_config import PlacementConfig

OWN = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "context_length": "model.max_length",
    "device": "placement.device",
    "dtype": "rollout.dtype",
    "random_seed": "run.seed",
    "enable_deterministic_inference": "rollout.deterministic",
    "rl_on_policy_target": "rollout.true_on_policy",
    "host": "rollout.host",
}
"""Server arguments that other settings decide."""
FIXED = (
    "port",
    "api_key",
    "admin_api_key",
    "nccl_port",
    "served_model_name",
    "weight_version",
    "custom_weight_loader",
    "skip_server_warmup",
    "skip_tokenizer_init",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "base_gpu_id",
    "gpu_id_step",
    "log_requests",
)
"""Server arguments that the engine itself needs for what it does."""


UNSUPPORTED = {
    "disaggregation_mode": "servers of the run do both; start the servers yourself and set rollout.urls",
    "quantization": "weight syncs send weights that are not quantized; remove it",
    "enable_return_routed_experts": "the trainer does not replay routing; remove it",
    "enable_lora": "adapters are not trained or synced; remove it",
    "lora_paths": "adapters are not trained or synced; remove it",
    "grpc_mode": "SGLang's gRPC server asks for no API key; remove it",
    "smg_grpc_mode": "SGLang's gRPC server asks for no API key; remove it",
    "grpc_port": "SGLang's gRPC server asks for no API key; remove it",
}
"""Server arguments that SGLang would accept and the run would get wrong, and why. Their off values are allowed."""
OFF = (None, False, "null")
WITHOUT_DRAFT_WEIGHTS = ("NGRAM",)
"""Speculative algorithms whose drafts need no weights, which no weight sync would update."""
LARGEST_SET = 4096
"""SGLang's own default of ``sampling_mask_max_tokens``."""


class SGLang(RolloutEngineConfig):
    """SGLang servers, one for every `gpus_per_engine` GPUs (on the CPU: one for each process of the placement)."""

    kind: Literal["sglang"] = "sglang"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number type of weights and KV cache; ``auto`` is float32 on the CPU and bfloat16 on a GPU."""
    gpus_per_engine: int = Field(1, ge=1)
    """GPUs of one server, on one machine or as many on each of several; its tensor parallel size is this over
    ``server_args.pp_size``, or what `server_args` says."""
    server_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any other field of the installed SGLang's ``ServerArgs``, under its own name."""
    router_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any argument of the SGLang router, under its own name; read with `router` only."""
    router: bool = False
    """Put the SGLang router in front; without, each rollout worker asks the server that has fewest of its requests."""
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
    deterministic: bool = False
    """SGLang's deterministic inference, with a seed for each sample. GPUs only."""
    true_on_policy: bool = False
    """SGLang's ``rl_on_policy_target``, deterministic inference included, which is meant for trainers with SGLang's own
    kernels. Plasmid's have others, so it makes the mismatch larger: on an H100 log-probabilities differ by 0.017 in the
    mean instead of 0.008. GPUs only, in bfloat16."""
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

    @field_validator("server_args")
    @classmethod
    def _known_to_sglang(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        lines = [f"{name}: is decided by {OWN[name]}; set that" for name in table if name in OWN]
        lines += [f"{name}: is set by the engine itself; remove it" for name in table if name in FIXED]
        others = {name: value for name, value in table.items() if name not in OWN and name not in FIXED}
        _raise([*lines, *mistakes("sglang", others), *unsupported(table)])
        return table

    @field_validator("router_args")
    @classmethod
    def _known_to_the_router(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        own = ("worker_urls", "host", "port", "prometheus_host", "prometheus_port", "api_key")
        lines = [f"{name}: is set by the engine itself; remove it" for name in table if name in own]
        others = {name: value for name, value in table.items() if name not in own}
        _raise([*lines, *mistakes("sglang-router", others)])
        return table

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.router_args and not self.router:
            yield "router_args: are never read without a router; remove the table or set router = true"
        if self.pause_mode == "in_place" and not self.recompute_kv and not self.server_args.get("disable_radix_cache"):
            yield (
                "recompute_kv: false would serve prefixes that an older policy has computed; "
                "set server_args.disable_radix_cache = true"
            )
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
        """What does not fit the rest of the recipe."""
        place = config.placement
        engines = len(self.urls) or place.engine_ranks // self.gpus_per_engine
        if not self.urls and place.engine_ranks % self.gpus_per_engine:
            yield (
                f"placement.engine_ranks: {place.engine_ranks} does not divide into engines of "
                f"rollout.gpus_per_engine = {self.gpus_per_engine}"
            )
        yield from self._unread_placement(place) if self.urls else self._split_engines(place)
        if self.min_engines > max(engines, 1):
            yield f"rollout.min_engines: {self.min_engines} is more than the {engines} engines that are started"
        if self.wire == "ipc" and not place.colocated:
            yield 'rollout.wire: "ipc" shares the memory of one GPU; set placement.colocated = true or another wire'
        if self.wire == "broadcast" and place.colocated:
            yield 'rollout.wire: "broadcast" needs trainer and engines on GPUs of their own; set "auto"'
        yield from exact_mistakes(self, config)
        if self.gives_kept_sets():
            yield from self._too_large_sets(config)

    def _too_large_sets(self, config: RunConfig) -> Iterator[str]:
        """SGLang refuses to say what was left to draw from unless top-k bounds it."""
        limit = self.server_args.get("sampling_mask_max_tokens", LARGEST_SET)
        for place, sampling in config.samplings().items():
            if sampling.is_restricted and sampling.temperature and (sampling.top_k == "all" or sampling.top_k > limit):
                yield (
                    f"{place}.top_k: must be at most {limit} with top_p, top_k or min_p, so that SGLang can say what "
                    f"they left to draw from, got {sampling.top_k!r}; lower it, or raise "
                    "rollout.server_args.sampling_mask_max_tokens"
                )

    def _unread_placement(self, place: PlacementConfig) -> Iterator[str]:
        """Servers at `urls` have no ranks in the run, so nothing that is said of ranks can hold for them."""
        for name, why in (
            ("engine_ranks", "servers at rollout.urls take no GPUs of the run"),
            ("colocated", "servers at rollout.urls share no GPUs with the trainer"),
            ("offload_engine", "the memory of servers at rollout.urls is not the run's"),
            ("eval_ranks", "servers at rollout.urls cannot hold another version for evaluations"),
        ):
            if (value := getattr(place, name)) != type(place).model_fields[name].default:
                yield f"placement.{name}: {_toml(value)} is never read, {why}; remove it"

    def packages(self) -> Mapping[str, str]:
        """SGLang itself, unless the servers at `urls` are started by somebody else."""
        return {} if self.urls else {"sglang": "plasmid-sglang[server]"}

    def takes_ranks(self) -> bool:
        """Servers at `urls` take none."""
        return not self.urls

    def _split_engines(self, place: PlacementConfig) -> Iterator[str]:
        size = self.gpus_per_engine
        slots = place.slots(trainers=place.trainer_ranks, engines=place.engine_ranks, evals=place.eval_ranks)
        for nodes in (slots.engine, slots.evaluation):
            for first in range(0, len(nodes) - size + 1, size):
                if why := uneven(nodes[first : first + size], self.server_args.get("pp_size", 1)):
                    yield (
                        f"rollout.gpus_per_engine: {size} over placement.nodes = {place.nodes} makes an engine of "
                        f"{why}; choose other numbers of ranks"
                    )
                    return

    def canary(self) -> CanaryPlan:
        """After each weight sync: SGLang loads weights by code of its own."""
        usual = 0.02 if self.dtype == "float32" else 0.25
        return CanaryPlan(tolerance=usual if self.canary_tolerance == "auto" else self.canary_tolerance)

    def gives_kept_sets(self) -> bool:
        """Releases that return what was left to draw from can be told how much; servers of others may be older."""
        return not self.urls and knows("sglang", "sampling_mask_max_tokens")

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        """Servers, and the heads of each GPU."""
        if self.urls:
            return
        pipeline, shards = self.server_args.get("pp_size", 1), self.server_args.get("dp_size", 1)
        split = self.gpus_per_engine // pipeline // (shards if self.server_args.get("enable_dp_attention") else 1)
        yield "servers", str(ranks // self.gpus_per_engine), f"{ranks} engine ranks / {self.gpus_per_engine} of each"
        heads = model.get("num_attention_heads")
        if isinstance(heads, int) and split > 1:
            if heads % split:
                raise ConfigError(
                    f"rollout.gpus_per_engine: the model's num_attention_heads = {heads} cannot be split over {split} "
                    "GPUs"
                )
            yield "attention heads of a GPU", str(heads // split), f"{heads} over {split} GPUs of a server"

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .starting import start_engine

        return await start_engine(self, context)


def unsupported(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Server arguments with which a run would silently go wrong."""
    for name, why in UNSUPPORTED.items():
        if arguments.get(name) not in OFF:
            yield f"{name}: {arguments[name]!r} is not supported: {why}"
    if (workers := arguments.get("tokenizer_worker_num", 1)) != 1:
        yield f"tokenizer_worker_num: must be 1, got {workers}: with more, SGLang asks for no API key"
    algorithm = arguments.get("speculative_algorithm")
    if algorithm is not None and algorithm not in WITHOUT_DRAFT_WEIGHTS:
        yield (
            f"speculative_algorithm: {algorithm!r} is not supported: weight syncs do not update the draft model; "
            f"choose {', '.join(map(repr, WITHOUT_DRAFT_WEIGHTS))} or remove it"
        )


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _raise(lines: list[str]) -> None:
    if lines:
        raise ValueError("\n".join(lines))
