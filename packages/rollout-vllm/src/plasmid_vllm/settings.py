"""Settings of the vLLM engine."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from plasmid.components import BuildContext, RecipeView
from plasmid.protocols import RolloutEngine
from plasmid.settings.resume import MAY_CHANGE
from plasmid.types import SamplingParams
from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_serving.settings import ServersConfig
from pydantic import Field, field_validator

from .completions import TIES

RELEASE = "0.32"
"""Supported release of vLLM, with all its patch versions."""
OWN = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "max_model_len": "model.max_length",
    "dtype": "rollout.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.gpus_per_engine",
    "enable_sleep_mode": "placement.offload_engine",
}
"""Server arguments that are set through other settings."""
FIXED = (
    *("worker_cls", "worker_extension_cls", "distributed_executor_backend", "scheduler_cls"),
    *("logprobs_mode", "skip_tokenizer_init", "disable_log_stats", "enable_log_requests", "stream_interval"),
    *("served_model_name", "weight_transfer_config", "return_sampling_mask", "max_num_queued_reqs"),
)
"""Server arguments that the engine sets itself."""
UNSUPPORTED = {
    "quantization": "weight syncs send unquantized weights",
    "speculative_config": "weight syncs do not update the draft model",
    "spec_model": "weight syncs do not update the draft model",
    "spec_method": "weight syncs do not update the draft model",
    "enable_lora": "servers merge the adapter of trainer.lora into the weights",
    "logits_processors": "changes the sampling distribution in a way that the trainer cannot compute",
    "watermark_config": "changes the sampling distribution in a way that the trainer cannot compute",
    "enable_return_routed_experts": "follows from trainer.routing_replay; set that instead",
    "pipeline_parallel_size": "servers use tensor parallelism only",
    "data_parallel_size": "set placement.engine_ranks to start more servers",
    "nnodes": "a server runs on one machine",
}
"""Server arguments that vLLM accepts but that break a run, with the reason. Their off values are allowed."""
TEMPERATURES = (0.01, 2.0)
"""Lowest and highest temperature of sampling. vLLM raises lower ones to the lowest, and refuses higher ones."""
LARGEST_SET = 4096
"""Default of the largest ``top_k`` with which vLLM returns the kept tokens."""


class VLLM(ServersConfig):
    """vLLM servers, one for every `gpus_per_engine` GPUs (on the CPU: one per process of the placement)."""

    kind: Literal["vllm"] = "vllm"
    memory_share: ClassVar[str] = "gpu_memory_utilization"
    gpus_per_engine: int = Field(1, ge=1)
    """Number of GPUs per server, all on one machine: the tensor parallel size."""
    server_args: Mapping[str, Any] = Field(default_factory=dict)
    """Any other field of vLLM's ``AsyncEngineArgs``, by its original name."""
    python: Annotated[str, MAY_CHANGE] = ""
    """Python interpreter of the environment with vLLM and plasmid-vllm, on each machine with servers; empty for the
    run's own. vLLM pins a version of torch, which the trainer then need not share."""

    @field_validator("server_args")
    @classmethod
    def _check_server_args(cls, table: Mapping[str, Any]) -> Mapping[str, Any]:
        if lines := list(_argument_errors(table)):
            raise ValueError("\n".join(lines))
        return table

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        if self.urls:
            yield (
                "urls: vLLM servers that the run did not start cannot receive weights; remove it, or evaluate "
                'the served model with kind = "server"'
            )
        if self.pause_mode == "in_place" and not self.recompute_kv and self.server_args.get("enable_prefix_caching", 1):
            yield (
                "recompute_kv: false would reuse KV entries computed by an older policy; "
                "set server_args.enable_prefix_caching = false"
            )
        yield from super().find_errors(recipe)
        if recipe is not None:
            yield from self._sampling_errors(recipe)

    def _sampling_errors(self, recipe: RecipeView) -> Iterator[str]:
        """Yield errors for temperatures that vLLM refuses or changes, and for truncations without a top-k bound on the
        kept tokens."""
        yield from _temperature_errors({**recipe.samplings, **recipe.eval_samplings})
        limit = self.server_args.get("max_logprobs", LARGEST_SET + TIES) - TIES
        for place, sampling in recipe.samplings.items():
            if sampling.is_restricted and (sampling.top_k == "all" or sampling.top_k > limit):
                yield (
                    f"{place}.top_k: must be at most {limit} with top_p, top_k or min_p, got {sampling.top_k!r}: vLLM "
                    "returns kept sets up to this size; lower it, or raise "
                    "rollout.server_args.max_logprobs"
                )

    def packages(self) -> Mapping[str, str]:
        """Return vLLM itself, unless it is in a separate environment."""
        return {} if self.python else {"vllm": "plasmid-vllm[server]"}

    def lacks(self) -> Iterator[str]:
        yield from super().lacks()
        if self.python and not os.access(self.python, os.X_OK):
            yield f"python: no program {self.python!r} on this machine; `make vllm` creates .venv-vllm/bin/python"

    def split_error(self, ranks: Sequence[int]) -> str:
        """Return why a server cannot have these numbers of ranks on its machines; empty if it can."""
        return f"{len(ranks)} machines; a vLLM server runs on one" if len(ranks) > 1 else ""

    def gives_experts(self) -> bool:
        return True

    def gives_kept_sets(self) -> bool:
        return True

    def sampling_settings(self) -> frozenset[str]:
        """Return all optional settings except ``stop_regex``, which vLLM does not have."""
        return frozenset(SamplingParams.OPTIONAL) - {"stop_regex"}

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        from .estimate import estimate

        return estimate(self, context)

    async def build(self, context: BuildContext) -> RolloutEngine:
        from plasmid_serving.start import start_engine

        from .dialect import make_dialect

        return await start_engine(self, context, make_dialect)


@cache
def argument_names() -> tuple[str, ...]:
    """Return the fields of ``AsyncEngineArgs``."""
    return tuple((Path(__file__).parent / f"arguments-{RELEASE}.txt").read_text().split())


def _is_off(value: Any) -> bool:
    """Return whether an argument has no effect: None, false, or one process. True equals 1, but is not off."""
    return value is None or value is False or (value == 1 and value is not True)


def _temperature_errors(samplings: Mapping[str, SamplingParams]) -> Iterator[str]:
    """Yield a line for each temperature that vLLM does not sample with, at the key where it is set."""
    lowest, highest = TEMPERATURES
    general = samplings["sampling"].temperature
    for place, sampling in samplings.items():
        temperature = sampling.temperature
        is_inherited = place != "sampling" and temperature == general
        if temperature != 0 and not lowest <= temperature <= highest and not is_inherited:
            yield (
                f"{place}.temperature: must be 0 (greedy) or from {lowest:g} to {highest:g} with vLLM, "
                f"got {temperature:g}"
            )


def _argument_errors(table: Mapping[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        if name in OWN:
            yield f"{name}: follows from {OWN[name]}; set that instead"
        elif name in FIXED:
            yield f"{name}: is set by Plasmid; remove it"
        elif name in UNSUPPORTED and not _is_off(value):
            yield f"{name}: {value!r} is not supported: {UNSUPPORTED[name]}; remove it"
        elif name not in argument_names():
            close = difflib.get_close_matches(name, argument_names(), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"{name}: not an argument of vLLM {RELEASE}{hint}"
