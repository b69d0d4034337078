"""Settings of the SGLang engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from plasmid.components import BuildContext, PlanRow
from plasmid.errors import ConfigError
from plasmid.protocols import RolloutEngine
from plasmid_serving.settings import ServersConfig
from pydantic import Field, field_validator

from .exactness import exact_mistakes
from .schema import knows, mistakes

if TYPE_CHECKING:
    from plasmid.config.run import RunConfig

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


class SGLang(ServersConfig):
    """SGLang servers, one for every `gpus_per_engine` GPUs (on the CPU: one for each process of the placement)."""

    kind: Literal["sglang"] = "sglang"
    gpus_per_engine: int = Field(1, ge=1)
    """GPUs of one server, on one machine or as many on each of several; its tensor parallel size is this over
    ``server_args.pp_size``, or what `server_args` says."""
    server_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any other field of the installed SGLang's ``ServerArgs``, under its own name."""
    router_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any argument of the SGLang router, under its own name; read with `router` only."""
    router: bool = False
    """Put the SGLang router in front; without, each rollout worker asks the server that has fewest of its requests."""
    deterministic: bool = False
    """SGLang's deterministic inference, with a seed for each sample. GPUs only."""
    true_on_policy: bool = False
    """SGLang's ``rl_on_policy_target``, deterministic inference included, which is meant for trainers with SGLang's own
    kernels. Plasmid's have others, so it makes the mismatch larger: on an H100 log-probabilities differ by 0.017 in the
    mean instead of 0.008. GPUs only, in bfloat16."""

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
        if self.pause_mode == "in_place" and not self.recompute_kv and not self.server_args.get("disable_radix_cache"):
            yield (
                "recompute_kv: false would serve prefixes that an older policy has computed; "
                "set server_args.disable_radix_cache = true"
            )
        yield from super().misfits()

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        """Validate against the rest of the recipe."""
        yield from super().mistakes(config)
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

    def packages(self) -> Mapping[str, str]:
        """SGLang itself, unless the servers at `urls` are started by somebody else."""
        return {} if self.urls else {"sglang": "plasmid-sglang[server]"}

    def split_error(self, ranks: Sequence[int]) -> str:
        """Why a server with so many ranks on each of its machines is impossible; empty if it is possible."""
        count, pipeline = len(ranks), self.server_args.get("pp_size", 1)
        if len(set(ranks)) > 1:
            return f"{' + '.join(map(str, ranks))} GPUs on {count} machines, and SGLang wants as many on each"
        if pipeline % count and count % pipeline:
            return f"{count} machines, over which server_args.pp_size = {pipeline} stages cannot be spread"
        return ""

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
        from plasmid_serving.start import start_engine

        from .dialect import make_dialect

        return await start_engine(self, context, make_dialect(self, context))


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


def _raise(lines: list[str]) -> None:
    if lines:
        raise ValueError("\n".join(lines))
