"""Memory and time estimate for the embedded engine, from ``config.json`` alone. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.estimates.servers import Decoder, resident_weights
from plasmid_models.estimates.shape import ModelShape

if TYPE_CHECKING:
    from .settings import HF

LAYER_S = 0.001
"""Seconds per layer and decoding step. Derived from 27 ms for 28 layers with transformers, not measured with this
engine."""
SYNC_S, SYNC_RATE = 0.05, 2e9
"""Minimum duration of a weight sync, in seconds, and its transfer rate through the host, in bytes per second."""


def estimate(settings: HF, context: EstimateContext) -> list[PhaseEstimate]:
    """Estimate the phases of one batch on one rank. Raises `ConfigError` for models whose weights are not known."""
    shape, device, place = ModelShape.of(context.models["model"]), context.device, context.config.placement
    dtype_bytes = 4 if settings.number_type(on_gpu=context.on_gpu) == "float32" else 2
    spec = context.config.trainer.adapter()
    adapter = 0 if spec is None else shape.adapter_parameters(spec.rank, spec.targets) * dtype_bytes
    weights = resident_weights(shape, dtype_bytes, 1) + adapter
    of_token = float(shape.token_cache * dtype_bytes)
    of_request = shape.request_bytes(dtype_bytes, columns=shape.net.kernel if shape.net else None)
    rows = min(settings.max_batch, -(-context.load.samples // place.engine_ranks))
    wanted = rows * context.load.longest * of_token
    limit = settings.kv_tokens * of_token if isinstance(settings.kv_tokens, int) else wanted
    if device is not None and settings.kv_tokens == "auto":
        limit = settings.kv_memory_fraction * max(0.0, device.memory - weights) - settings.max_batch * of_request
    pool = min(wanted, max(0.0, limit))
    states = float(rows * of_request)
    whole = {"engine's weights": weights, "KV cache": pool} | ({"states": states} if shape.linear else {})
    seconds = None
    if device is not None:
        decoder = Decoder(
            shape=shape,
            device=device,
            gpus=1,
            dtype_bytes=dtype_bytes,
            pool_tokens=(pool + states) / of_token,
            max_requests=settings.max_batch,
            layer_s=LAYER_S,
        )
        seconds = decoder.seconds(context.load, place.engine_ranks)
    sent = adapter or shape.parameters * dtype_bytes  # the base is sent once
    away = place.offload_engine and device is not None
    weights_alone = {"engine's weights": weights}
    return [
        PhaseEstimate(phase="idle", memory={} if away else whole),
        PhaseEstimate(
            phase="sample", memory=whole, seconds=seconds, basis=f"{place.engine_ranks} x {settings.max_batch} requests"
        ),
        PhaseEstimate(
            phase="sync",
            memory=weights_alone if away else whole,
            seconds=None if device is None else SYNC_S + sent / SYNC_RATE,
            basis=f"{sent / 1e9:.1f} GB",
        ),
    ]
