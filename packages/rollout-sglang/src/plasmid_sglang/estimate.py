"""GPU usage estimate of SGLang servers, for `rl plan`. Imports neither torch nor SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.estimates.servers import Servers, estimate_servers

if TYPE_CHECKING:
    from .settings import SGLang

STATIC_SHARE = 0.85
"""Approximate ``mem_fraction_static`` if the recipe leaves it to SGLang."""


def estimate(settings: SGLang, context: EstimateContext) -> list[PhaseEstimate]:
    """Estimate the phases of one batch. Raises `ConfigError` for models whose weights are not known."""
    if settings.urls:
        return []
    arguments, gpus = settings.server_args, settings.gpus_per_engine
    servers = Servers(
        gpus=gpus,
        split=arguments.get("tp_size", gpus // arguments.get("pp_size", 1)),
        dtype_bytes=4 if settings.dtype == "float32" else 2,
        share=arguments.get(settings.memory_share) or STATIC_SHARE,
        share_key=f"rollout.server_args.{settings.memory_share}",
        max_requests=settings.max_requests,
        adapter=settings.choose_sent_adapter(context.config, on_gpu=context.on_gpu),
    )
    return estimate_servers(servers, context)
