"""Settings of the embedded engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from plasmid.components import BuildContext, CanaryPlan, RecipeView, RolloutEngineConfig
from plasmid.errors import ConfigError
from plasmid.protocols import PauseMode, RolloutEngine
from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.folder import read_config
from pydantic import Field

from .layers import check_layers


class HF(RolloutEngineConfig):
    """Hugging Face models in the run's own processes, on CPU or GPU, with continuous batching."""

    kind: Literal["hf"] = "hf"
    reads_quantized: ClassVar[bool] = True
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights and the KV cache; ``auto`` is float32 on the CPU and bfloat16 on a GPU."""
    max_batch: int = Field(64, ge=1, le=4096)
    """Maximum number of requests that each process decodes together; further requests wait."""
    prefill_tokens: int = Field(4096, ge=1)
    """Maximum number of prompt tokens per forward pass; a longer prompt is prefilled alone."""
    kv_block: int = Field(64, ge=16, le=4096)
    """Number of tokens by which the KV cache of a request grows; a multiple of 16."""
    kv_tokens: Literal["auto"] | int = "auto"
    """Maximum number of tokens in the KV cache; ``auto`` is unlimited on the CPU, and set by `kv_memory_fraction` on
    a GPU."""
    kv_memory_fraction: float = Field(0.5, gt=0.0, le=0.95)
    """Fraction of the GPU memory left after loading the model that the KV cache may use; an error with
    `placement.device` = "cpu"."""
    pause_mode: PauseMode = "in_place"
    """Treatment of running requests at a weight sync: they finish first (``wait``), are cut off (``abort``), or
    are paused and continue under the new policy (``in_place``)."""
    recompute_kv: bool = True
    """Recompute the KV cache of paused requests after a weight sync, so that a token's log-probability is that of
    the policy version that sampled it. If false, earlier tokens keep the keys and values of the older policy."""
    bucket_bytes: int = Field(32 << 20, ge=1 << 10)
    """Maximum size of a weight-sync bucket, in bytes; a larger tensor gets its own bucket."""
    canary_every: int = Field(10, ge=0)
    """Interval, in policy versions, at which the log-probabilities of engine and trainer are compared on a fixed
    prompt. The first version is always checked; 0 disables the check."""
    canary_tolerance: Literal["auto"] | Annotated[float, Field(gt=0.0)] = "auto"
    """Maximum mean difference of those log-probabilities, in nats; ``auto`` is 0 with `run.deterministic`, else 0.02
    with dtype = "float32" and 0.25 otherwise."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.kv_block % 16:
            yield f"kv_block must be a multiple of 16, got {self.kv_block}"
        if isinstance(self.kv_tokens, int) and self.kv_tokens < self.kv_block:
            yield f"kv_tokens must be 'auto' or at least kv_block = {self.kv_block}, got {self.kv_tokens}"
        if recipe is not None and recipe.deterministic and self.canary_tolerance != "auto":
            yield (
                f"{recipe.key}.canary_tolerance: must be 'auto' with run.deterministic, which tolerates no difference, "
                f"got {self.canary_tolerance:g}; remove it"
            )

    def is_batch_invariant(self) -> bool:
        return True

    def gives_kept_sets(self) -> bool:
        return True

    def gives_experts(self) -> bool:
        return True

    def number_type(self, *, on_gpu: bool) -> str:
        """Return the torch name of the data type of weights and KV cache."""
        return self.dtype if self.dtype != "auto" else "bfloat16" if on_gpu else "float32"

    def canary(self) -> CanaryPlan | None:
        """Return the canary plan: the engine's cache and attention differ from the trainer's code."""
        usual = 0.02 if self.dtype == "float32" else 0.25
        tolerance = usual if self.canary_tolerance == "auto" else self.canary_tolerance
        return CanaryPlan(tolerance=tolerance, every=self.canary_every, alone=True) if self.canary_every else None

    def check(self, recipe: RecipeView) -> None:
        if self._is_set("kv_memory_fraction") and recipe.placement.device == "cpu":
            raise ConfigError(
                f"rollout.kv_memory_fraction: {self.kv_memory_fraction:g} has no effect on a CPU; remove it, or set "
                "rollout.kv_tokens to limit the KV cache"
            )
        check_layers(Path(recipe.model.path), read_config("model", Path(recipe.model.path)))

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        from .estimate import estimate

        return estimate(self, context)

    async def build(self, context: BuildContext) -> RolloutEngine:
        from .engine import start_engine

        return await start_engine(self, context)
