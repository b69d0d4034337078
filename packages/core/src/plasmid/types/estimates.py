"""Estimates that trainers and engines provide for `rl plan`: memory and time of each phase of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..config.run import RunConfig

Phase = Literal["idle", "sample", "score", "train", "sync"]
"""Phases of a batch. In ``idle``, the other part of a colocated pair (trainer or engine) computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU model, with the vendor's specifications."""

    name: str
    memory: float
    """Memory available to programs, in bytes."""
    flops: float
    """Dense bfloat16 matrix multiplication, in FLOP/s."""
    fp32_flops: float
    """float32 without tensor cores, in FLOP/s."""
    bandwidth: float
    """Memory bandwidth, in bytes/s."""
    link: float
    """Bandwidth to another GPU of the machine, in one direction, in bytes/s."""
    source: str
    """Document with the vendor's specifications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Tokens of one batch."""

    samples: int
    prompts: int
    prompt_tokens: int
    """Mean length of a prompt."""
    response_tokens: int
    """Mean length of a completion."""
    longest: int
    """Maximum possible length of a sample."""
    steps: int
    """Number of optimizer steps."""

    @property
    def sample_tokens(self) -> int:
        """Mean length of a sample, including the prompt."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of all samples, including prompts."""
        return self.samples * self.sample_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EstimateContext:
    """Inputs from which a trainer or an engine computes its estimates."""

    config: RunConfig
    """The whole recipe: any setting may cost memory or time, such as the interval of checkpoints in `checkpoint`, the
    other models of the run in `reference`, or the engine that shares the GPUs."""
    models: Mapping[str, Mapping[str, Any]]
    """The ``config.json`` of the policy and of all other models that the algorithm needs, by table."""
    device: Accelerator | None
    """The GPU; None for CPUs, for which there are no estimates of time."""
    load: BatchLoad

    @property
    def on_gpu(self) -> bool:
        """True if the run computes on GPUs."""
        return self.device is not None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PhaseEstimate:
    """Estimate of one phase of a batch, for the rank with the highest load."""

    phase: Phase
    memory: Mapping[str, float]
    """Peak memory of the rank's device by purpose, in bytes."""
    seconds: float | None = None
    """Time per batch, in seconds; None if not estimated."""
    basis: str = ""
    """Description of how the time is computed."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Additional results, by name."""
    obstacle: str = ""
    """Reason why the phase cannot run even with enough memory, as ``<key>: ...``; empty if there is none."""

    @property
    def total(self) -> float:
        """Total peak memory, in bytes."""
        return sum(self.memory.values())
