"""GPU usage estimate of vLLM servers, for `rl plan`. Imports neither torch nor vLLM.

Speed and overhead are those of SGLang, because vLLM has not been measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.estimates.servers import Servers, estimate_servers

if TYPE_CHECKING:
    from .settings import VLLM

USED_SHARE = 0.9
"""vLLM's default of ``gpu_memory_utilization``."""


def estimate(settings: VLLM, context: EstimateContext) -> list[PhaseEstimate]:
    """Estimate the phases of one batch. Raises `ConfigError` for models whose weights are not known."""
    if settings.urls:
        return []
    servers = Servers(
        gpus=settings.gpus_per_engine,
        split=settings.gpus_per_engine,
        dtype_bytes=4 if settings.dtype == "float32" else 2,
        share=settings.server_args.get(settings.memory_share, USED_SHARE),
        share_key=f"rollout.server_args.{settings.memory_share}",
        max_requests=settings.max_requests,
        adapter=settings.choose_sent_adapter(context.config, on_gpu=context.on_gpu),
    )
    return estimate_servers(servers, context)
