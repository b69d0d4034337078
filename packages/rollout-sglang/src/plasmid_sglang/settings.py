"""Settings of the SGLang engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from plasmid.components import BuildContext, RecipeView
from plasmid.protocols import RolloutEngine
from plasmid.types import SamplingParams
from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_serving.settings import ServersConfig
from pydantic import Field, field_validator

from .exactness import exactness_errors
from .schema import argument_errors, has_argument

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
"""Server arguments that are set through other settings."""
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
"""Server arguments that the engine sets itself."""


UNSUPPORTED = {
    "disaggregation_mode": "each server of the run does prefill and decoding; to split them, set rollout.urls",
    "quantization": "weight syncs send unquantized weights; remove it",
    "enable_return_routed_experts": "follows from trainer.routing_replay; set that instead",
    "enable_lora": "servers merge the adapter of trainer.lora into the weights; remove it",
    "lora_paths": "servers merge the adapter of trainer.lora into the weights; remove it",
    "grpc_mode": "SGLang's gRPC server does not check the API key; remove it",
    "smg_grpc_mode": "SGLang's gRPC server does not check the API key; remove it",
    "grpc_port": "SGLang's gRPC server does not check the API key; remove it",
}
"""Server arguments that SGLang accepts but that break a run, with the reason. Their off values are allowed."""
OFF = (None, False, "null")
WITHOUT_DRAFT_WEIGHTS = ("NGRAM",)
"""Speculative algorithms whose drafts have no weights to sync."""
LARGEST_SET = 4096
"""SGLang's default of ``sampling_mask_max_tokens``."""


class SGLang(ServersConfig):
    """SGLang servers, one for every `gpus_per_engine` GPUs (on the CPU: one per process of the placement)."""

    kind: Literal["sglang"] = "sglang"
    memory_share: ClassVar[str] = "mem_fraction_static"
    gpus_per_engine: int = Field(1, ge=1)
    """Number of GPUs per server, on one machine or evenly spread over several. The tensor parallel size is this
    divided by ``server_args.pp_size``, unless `server_args` sets it."""
    server_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any other field of the installed SGLang's ``ServerArgs``, by its original name."""
    router_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any argument of the SGLang router, by its original name; used only with `router`."""
    router: bool = False
    """Put the SGLang router in front of the servers. If false, each rollout worker picks the server with the fewest
    of its own requests."""
    deterministic: bool = False
    """Use SGLang's deterministic inference, with a seed per sample. GPUs only."""
    true_on_policy: bool = False
    """Use SGLang's ``rl_on_policy_target``, which includes deterministic inference and is meant for trainers with
    SGLang's own kernels. Plasmid's trainers use other kernels, so it increases the mismatch: on an H100,
    log-probabilities differ by 0.017 in the mean instead of 0.008. GPUs only, in bfloat16."""

    @field_validator("server_args")
    @classmethod
    def _check_server_args(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        lines = [f"{name}: follows from {OWN[name]}; set that instead" for name in table if name in OWN]
        lines += [f"{name}: is set by Plasmid; remove it" for name in table if name in FIXED]
        others = {name: value for name, value in table.items() if name not in OWN and name not in FIXED}
        _raise([*lines, *argument_errors("sglang", others), *unsupported(table)])
        return table

    @field_validator("router_args")
    @classmethod
    def _check_router_args(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        own = ("worker_urls", "host", "port", "prometheus_host", "prometheus_port", "api_key")
        lines = [f"{name}: is set by Plasmid; remove it" for name in table if name in own]
        others = {name: value for name, value in table.items() if name not in own}
        _raise([*lines, *argument_errors("sglang-router", others)])
        return table

    def has_router(self) -> bool:
        return self.router

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        if self.router_args and not self.router:
            yield "router_args: has no effect without a router; remove the table or set router = true"
        if self.pause_mode == "in_place" and not self.recompute_kv and not self.server_args.get("disable_radix_cache"):
            yield (
                "recompute_kv: false would reuse KV entries computed by an older policy; "
                "set server_args.disable_radix_cache = true"
            )
        yield from super().find_errors(recipe)
        if recipe is not None:
            yield from exactness_errors(self, recipe)
            if self.gives_kept_sets():
                yield from self._kept_set_errors(recipe)

    def _kept_set_errors(self, recipe: RecipeView) -> Iterator[str]:
        """Yield errors for truncations without a top-k bound, for which SGLang refuses to return the kept tokens."""
        limit = self.server_args.get("sampling_mask_max_tokens", LARGEST_SET)
        for place, sampling in recipe.samplings.items():
            if sampling.is_restricted and sampling.temperature and (sampling.top_k == "all" or sampling.top_k > limit):
                yield (
                    f"{place}.top_k: must be at most {limit} with top_p, top_k or min_p, got {sampling.top_k!r}: "
                    "SGLang returns kept sets up to this size; lower it, or raise "
                    "rollout.server_args.sampling_mask_max_tokens"
                )

    def packages(self) -> Mapping[str, str]:
        """Return SGLang itself, unless external servers at `urls` are used."""
        return {} if self.urls else {"sglang": "plasmid-sglang[server]"}

    def split_error(self, ranks: Sequence[int]) -> str:
        """Return why a server cannot have these numbers of ranks on its machines; empty if it can."""
        count, pipeline = len(ranks), self.server_args.get("pp_size", 1)
        if len(set(ranks)) > 1:
            return f"{' + '.join(map(str, ranks))} GPUs on {count} machines; SGLang requires the same number on each"
        if pipeline % count and count % pipeline:
            return f"{count} machines, which cannot be split into server_args.pp_size = {pipeline} pipeline stages"
        return ""

    def gives_experts(self) -> bool:
        """Return whether the run's own servers record experts of all layers; with pipeline parallelism they do not."""
        return not self.urls and int(self.server_args.get("pp_size", 1)) == 1

    def gives_kept_sets(self) -> bool:
        """Return whether servers return the kept tokens. The check is the server argument that limits their number."""
        return not self.urls and has_argument("sglang", "sampling_mask_max_tokens")

    def sampling_settings(self) -> frozenset[str]:
        """Return all optional settings."""
        return frozenset(SamplingParams.OPTIONAL)

    def tensor_parallel(self) -> int:
        pipeline, shards = self.server_args.get("pp_size", 1), self.server_args.get("dp_size", 1)
        return int(self.gpus_per_engine // pipeline // (shards if self.server_args.get("enable_dp_attention") else 1))

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        from .estimate import estimate

        return estimate(self, context)

    async def build(self, context: BuildContext) -> RolloutEngine:
        from plasmid_serving.start import start_engine

        from .dialect import make_dialect

        return await start_engine(self, context, make_dialect)


def unsupported(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield errors for server arguments with which a run would silently go wrong."""
    for name, why in UNSUPPORTED.items():
        if arguments.get(name) not in OFF:
            yield f"{name}: {arguments[name]!r} is not supported: {why}"
    if (workers := arguments.get("tokenizer_worker_num", 1)) != 1:
        yield f"tokenizer_worker_num: must be 1, got {workers}: with more, SGLang does not check the API key"
    algorithm = arguments.get("speculative_algorithm")
    if algorithm is not None and algorithm not in WITHOUT_DRAFT_WEIGHTS:
        yield (
            f"speculative_algorithm: {algorithm!r} is not supported: weight syncs do not update the draft model; "
            f"choose {', '.join(map(repr, WITHOUT_DRAFT_WEIGHTS))} or remove it"
        )


def _raise(lines: list[str]) -> None:
    if lines:
        raise ValueError("\n".join(lines))
