"""Estimates of memory and time for sampling with servers, from ``config.json`` only. Imports no torch.

A decoding step reads all weights and the KV cache of all running requests once, so it is bound by memory bandwidth plus
kernel launch overhead. The figures are from SGLang 0.5.17 on an H100 and an H200 (`docs/design/plan.md`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from plasmid.components import AdapterSpec
from plasmid.types.estimates import Accelerator, BatchLoad, EstimateContext, PhaseEstimate

from .accelerators import GIB
from .shape import ModelShape

BANDWIDTH_SHARE = 0.7
"""Fraction of the memory bandwidth that decoding reaches."""
PREFILL_SHARE = 0.4
"""Fraction of the vendor's FLOP/s that prefill reaches."""
BATCH_S = 0.05
"""Seconds per batch for requests, responses and rewards, in addition to decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One replica of a model that generates on one or more GPUs."""

    shape: ModelShape
    device: Accelerator
    gpus: int
    dtype_bytes: int
    pool_tokens: float
    """Capacity of the KV cache on all its GPUs, in tokens."""
    max_requests: float
    """Maximum number of concurrent requests."""
    layer_s: float
    """Minimum seconds per layer of a decoding step."""

    @property
    def cache_bytes(self) -> float:
        """Bytes of KV cache per token, over all GPUs."""
        return float(self.shape.token_cache * self.dtype_bytes)

    @property
    def request_tokens(self) -> float:
        """Number of tokens in the KV cache that take as much memory as a request's states (linear attention)."""
        return self.shape.request_bytes(self.dtype_bytes) / self.cache_bytes

    def concurrency(self, load: BatchLoad, replicas: int) -> float:
        """Return the mean number of concurrent requests after the start."""
        mean = load.prompt_tokens + load.response_tokens / 2
        fitting = self.pool_tokens / max(1.0, mean + self.request_tokens)
        return max(1.0, min(load.samples / replicas, fitting, self.max_requests))

    def seconds(self, load: BatchLoad, replicas: int) -> float:
        """Return the seconds to generate all samples of a batch with ``replicas`` replicas like this one."""
        running = self.concurrency(load, replicas)
        waves = max(1.0, load.samples / replicas / running)
        context = load.prompt_tokens + load.response_tokens / 2
        # an expert is read if any running request is routed to it
        active = self.shape.parameters - self.shape.expert_parameters
        visited = 1 - (1 - self.shape.visited_experts) ** running
        read = (
            active + visited * self.shape.expert_parameters
        ) * self.dtype_bytes + running * context * self.cache_bytes
        read += 2 * running * self.shape.request_bytes(self.dtype_bytes)  # states are read and written
        step = self.layer_s * self.shape.layers + read / (self.gpus * self.device.bandwidth * BANDWIDTH_SHARE)
        computed = 2 * self.shape.active * running / (self.gpus * self.device.flops * PREFILL_SHARE)
        prefill = 2 * self.shape.active * load.prompt_tokens * load.prompts / replicas
        prefill /= self.gpus * self.device.flops * PREFILL_SHARE
        seconds: float = BATCH_S + prefill + waves * load.response_tokens * max(step, computed)
        return seconds


def resident_weights(shape: ModelShape, dtype_bytes: int, gpus: int) -> float:
    """Return the bytes of weights on each GPU of a replica."""
    return shape.parameters * dtype_bytes / gpus


GRAPHS = 2.5 * GIB
"""Bytes of CUDA graphs and workspaces."""
ASLEEP = 1.5 * GIB
"""Bytes that a sleeping server keeps on a GPU: graphs and workspaces."""
LAYER_S = 0.00013
"""Minimum seconds per layer of a decoding step, with CUDA graphs and Triton attention (SGLang)."""
SYNC_S, SYNC_RATE = 0.02, 125e9
"""Minimum seconds of a weight sync, and bytes per second within a machine."""
ONLOAD_RATE = 33e9
"""Bytes per second from pinned host memory to a GPU, measured on an H200 (`docs/performance.md`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """GPU layout and limits of an engine's servers."""

    gpus: int
    """GPUs per server."""
    split: int
    """GPUs of a server that the attention heads are split over."""
    dtype_bytes: int
    share: float
    """Fraction of a GPU's memory for weights and KV cache."""
    share_key: str
    """Name of the setting for `share`."""
    max_requests: int
    """Maximum number of open requests per rollout worker."""
    adapter: AdapterSpec | None = None
    """The adapter that weight syncs send alone; None if they send all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Bytes that each weight sync after the first sends to a server, and of the weights that it is merged into."""

    sent: float
    """Bytes of all weights, or of the adapter."""
    base: float = 0.0
    """Bytes of the adapted weights, which each server keeps in host memory; 0 if all weights are sent."""

    @classmethod
    def of(cls, servers: Servers, shape: ModelShape) -> Self:
        """Return the sizes for these servers."""
        if servers.adapter is None:
            return cls(sent=shape.parameters * servers.dtype_bytes)
        rank, targets = servers.adapter.rank, servers.adapter.targets
        return cls(
            sent=4.0 * shape.adapter_parameters(rank, targets),  # A and B in fp32
            base=float(sum(weight.size for weight in shape.select_adapted(targets)) * servers.dtype_bytes),
        )

    def seconds(self, gpus: int) -> float:
        """Return the seconds of one sync, in which each of a server's GPUs copies its part of the base."""
        return SYNC_S + self.sent / SYNC_RATE + self.base / gpus / ONLOAD_RATE

    @property
    def basis(self) -> str:
        """Description of how the time is computed."""
        text = f"{self.sent / 1e9:.1f} GB"
        return f"adapter of {text}, base of {self.base / 1e9:.1f} GB from host memory" if self.base else text


def estimate_servers(servers: Servers, context: EstimateContext) -> list[PhaseEstimate]:
    """Return the phases of one batch on one GPU of a server; none on a CPU. Raises `ConfigError` for unknown models."""
    if context.device is None:
        return []
    shape, device, place = ModelShape.of(context.models["model"]), context.device, context.config.placement
    gpus, dtype_bytes, share = servers.gpus, servers.dtype_bytes, servers.share
    weights = resident_weights(shape, dtype_bytes, gpus)
    pool = share * device.memory - weights
    replicas = max(1, place.engine_ranks // gpus)
    # latent caches are whole on every GPU of a server; others are split by heads
    of_token = shape.token_cache * dtype_bytes / (1 if shape.has_latent_cache else servers.split)
    least = context.load.longest * of_token + shape.request_bytes(dtype_bytes) / servers.split
    tokens = max(pool, least) / of_token
    obstacle = ""
    if pool < least:
        obstacle = (
            f"{servers.share_key}: {share:g} of {device.memory / GIB:.0f} GiB is not enough for "
            f"{weights / GIB:.1f} GiB of weights and the KV cache{' and states' if shape.linear else ''} of one sample "
            f"of {context.load.longest:,} tokens, {least / GIB:.1f} GiB"
        )
    decoder = Decoder(
        shape=shape,
        device=device,
        gpus=gpus,
        dtype_bytes=dtype_bytes,
        pool_tokens=tokens,
        max_requests=servers.max_requests * place.rollout_workers / replicas,
        layer_s=LAYER_S,
    )
    running = decoder.concurrency(context.load, replicas)
    asleep = {"sleeping engine": ASLEEP}
    whole = {"engine's weights": weights, "KV cache": max(pool, least), "engine's graphs": GRAPHS}
    sync = Sync.of(servers, shape)
    return [
        PhaseEstimate(phase="idle", memory=asleep if place.offload_engine else whole),
        PhaseEstimate(
            phase="sample",
            memory=whole,
            seconds=decoder.seconds(context.load, replicas),
            obstacle=obstacle,
            basis=f"{replicas} servers x {running:.0f} requests",
            facts=_server_facts(decoder, sync, context.load.longest),
        ),
        PhaseEstimate(
            phase="sync",
            memory=asleep | {"engine's weights": weights} if place.offload_engine else whole,
            seconds=sync.seconds(gpus),
            basis=sync.basis,
        ),
    ]


def _server_facts(decoder: Decoder, sync: Sync, longest: int) -> dict[str, str]:
    """Return the capacity of a server's KV cache, and its memory apart from it."""
    tokens = decoder.pool_tokens
    samples = tokens // (longest + decoder.request_tokens)
    facts = {"KV cache of a server": f"{int(tokens):,} tokens, {samples:,.0f} longest samples"}
    if decoder.shape.linear:
        size = decoder.shape.request_bytes(decoder.dtype_bytes) / 2**20
        facts["states of a request"] = f"{size:,.1f} MiB, in the memory of the KV cache"
    if sync.base:
        facts["host memory of a server"] = f"{sync.base / GIB:.1f} GiB, base of the adapter"
    return facts
