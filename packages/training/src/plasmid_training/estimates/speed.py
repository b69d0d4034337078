"""Estimates of the time for training and scoring, from FLOPs and measured utilization. Imports no torch.

Utilization is from `benchmarks/results/trainer-h200.json`, `lora-h200.json`, and the table of attention kernels in
`docs/design/training-speed.md`; `docs/design/plan.md` compares estimates with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from plasmid.types.estimates import Accelerator

from .activations import Activations

LINEAR_SHARE = 0.48
"""Fraction of the vendor's bfloat16 FLOP/s that matrix products reach in a compiled step (0.60 for a large product)."""
FP32_SHARE = 0.65
"""The same in float32."""
EAGER_PASSES = 19.0
"""How many more times layers read or write their kept activations if they are not compiled."""
ATTENTION_SHARE = {"packed": 0.33, "dense": 0.667}
"""Fraction of the vendor's FLOP/s that attention reaches on long samples: FlashAttention-2 packed, cuDNN dense."""
ATTENTION_BYTES = {"packed": 175.0, "dense": 108.0}
"""Cost of attention on short samples: bytes read and written per element of a token's queries."""
BACKWARD = 2.5
"""FLOPs of attention's backward pass divided by those of its forward pass."""
MICROBATCH_S = 0.01
"""Seconds of launch overhead and waiting per microbatch."""
OPTIMIZER_BYTES = 28
"""Bytes read and written by AdamW per fp32 weight."""
LINK_SHARE = 0.7
NODE_LINK = 50e9
"""Bytes per second between machines for each GPU (400 Gbit/s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Cost of each part of a step per token, in forward passes."""

    layers: float
    head: float
    attention: float

    @classmethod
    def training(cls, *, recomputed: float, adapter: bool) -> Passes:
        """Return the passes of a training step; the base of an adapter needs no weight gradients.

        ``recomputed`` is the fraction of a forward pass that the backward pass repeats.
        """
        whole = 2.0 if adapter else 3.0
        return cls(layers=whole + recomputed, head=whole, attention=1 + BACKWARD + recomputed)


SCORING = Passes(layers=1.0, head=1.0, attention=1.0)


def compute_seconds(
    activations: Activations,
    device: Accelerator,
    *,
    tokens: float,
    sample_tokens: float,
    passes: Passes,
    parts: int = 1,
) -> float:
    """Return the seconds of one rank for ``tokens`` in samples of mean length ``sample_tokens``.

    ``parts`` is the number of ranks of one model replica.
    """
    shape = activations.shape
    head = shape.embedding
    rate = device.flops * LINEAR_SHARE if activations.dtype_bytes == 2 else device.fp32_flops * FP32_SHARE
    linear = 2 * tokens * ((shape.active - head) * passes.layers + head * passes.head) / rate
    if shape.net is not None:  # computed in fp32 for any dtype of the model
        recurrent = shape.linear * shape.net.flops * passes.layers
        linear += tokens * recurrent / (device.fp32_flops * FP32_SHARE)
    numbers = tokens * shape.attending * (shape.query + shape.value) / 2
    kind = activations.attention
    of_attention = passes.attention / (1 + BACKWARD)
    flops = (1 + BACKWARD) * 2 * numbers * sample_tokens
    attention = flops / (device.flops * ATTENTION_SHARE[kind]) + ATTENTION_BYTES[kind] * numbers / device.bandwidth
    eager = 0.0
    if not activations.compiled:
        eager = EAGER_PASSES * activations.layers(tokens) / device.bandwidth * passes.layers / 3
    return (linear + of_attention * attention + eager) / parts


def optimizer_seconds(parameters: float, device: Accelerator) -> float:
    """Return the seconds of one optimizer step over a rank's ``parameters``."""
    return OPTIMIZER_BYTES * parameters / device.bandwidth


def link_rate(device: Accelerator, nodes: int) -> float:
    """Return the bytes per second between two ranks, over the network if there are several machines."""
    return min(device.link, NODE_LINK if nodes > 1 else device.link) * LINK_SHARE
