"""Settings of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from plasmid.components import BuildContext, CanaryPlan, RolloutEngineConfig
from plasmid.protocols import PauseMode, RolloutEngine
from pydantic import Field


class HF(RolloutEngineConfig):
    """Hugging Face models in the run's own processes, on CPU or GPU, with continuous batching."""

    kind: Literal["hf"] = "hf"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number type of the weights and the KV cache; ``auto`` is float32 on the CPU and bfloat16 on a GPU."""
    max_batch: int = Field(64, ge=1, le=4096)
    """Requests that each process decodes together; the others wait for one of them to end."""
    prefill_tokens: int = Field(4096, ge=1)
    """Prompt tokens computed in one forward pass; a longer prompt is computed alone."""
    kv_block: int = Field(64, ge=16, le=4096)
    """Tokens that the KV cache of every request grows by; a multiple of 16."""
    kv_tokens: Literal["auto"] | int = "auto"
    """Tokens that the KV cache may hold; ``auto`` is no limit on the CPU, `kv_memory_fraction` on a GPU."""
    kv_memory_fraction: float = Field(0.5, gt=0.0, le=0.95)
    """Fraction of the GPU memory that is free after loading the model which the KV cache may take."""
    pause_mode: PauseMode = "in_place"
    """What happens to running requests when new weights come: they end first (``wait``), are cut off (``abort``), or
    are held and go on under the new policy (``in_place``)."""
    recompute_kv: bool = True
    """Compute the KV cache of held requests anew after a weight sync, so that a token's log-probability is that of the
    policy version that drew it; without, earlier tokens keep the keys and values of the older policy."""
    bucket_bytes: int = Field(32 << 20, ge=1 << 10)
    """Largest bucket of weights in a weight sync; a larger tensor travels alone."""
    canary_every: int = Field(10, ge=0)
    """Compare the log-probabilities of engine and trainer on a fixed prompt in every k-th version, the first included;
    0 for never."""
    canary_tolerance: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    """Maximum mean difference of those log-probabilities, in nats; ``auto`` is 0.02 with dtype = "float32" and 0.25
    otherwise."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.kv_block % 16:
            yield f"kv_block must be a multiple of 16, got {self.kv_block}"
        if isinstance(self.kv_tokens, int) and self.kv_tokens < self.kv_block:
            yield f"kv_tokens must be 'auto' or at least kv_block = {self.kv_block}, got {self.kv_tokens}"

    def gives_kept_sets(self) -> bool:
        return True

    def canary(self) -> CanaryPlan | None:
        """Its cache and attention are not the trainer's code."""
        usual = 0.02 if self.dtype == "float32" else 0.25
        tolerance = usual if self.canary_tolerance == "auto" else self.canary_tolerance
        return CanaryPlan(tolerance=tolerance, every=self.canary_every, alone=True) if self.canary_every else None

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .engine import start_engine

        return await start_engine(self, context)
