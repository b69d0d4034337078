"""The settings of the FSDP2 trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from plasmid.components import BuildContext, RecipeView
from plasmid.errors import ConfigError
from plasmid.protocols import Trainer
from plasmid.settings.resume import MAY_CHANGE
from plasmid.types import Role
from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.folder import read_text_config
from plasmid_models.kernels.invariant_layers import check_invariant_models
from plasmid_models.linear_attention import has_linear_attention
from plasmid_models.source import check_models
from plasmid_training.learning_settings import NOT_COMPILED_ERROR, CriticLearning, LearningSettings
from plasmid_training.lora_settings import LoRATrainerConfig
from plasmid_training.routing import check_routing_replay
from pydantic import Field, field_validator

BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary positions whose frequencies transformers derives from the largest position of its input."""
NOT_WITH_LINEAR_ATTENTION = {
    "compile": "whose number of chunks depends on the sequence's length",
    "share_prefixes": "whose state mixes the tokens of a sample",
}
"""Settings that linear attention does not support, and why."""
CPU_OFFLOAD_ERROR = "trainer.cpu_offload: requires GPUs, but the trainer is placed on the CPU; remove the setting"
OPTIMIZER_ONLY = {"betas": "adamw", "eps": "adamw", "momentum": "sgd", "nesterov": "sgd"}


class OptimizerSettings(LearningSettings):
    """Optimizer, learning-rate schedule and frozen parameters of one model."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer algorithm."""
    betas: tuple[float, float] = (0.9, 0.95)
    """adamw: decay rates of the running averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """adamw: term added to the denominator for numerical stability."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """sgd: momentum factor."""
    nesterov: bool = False
    """sgd: use Nesterov momentum."""

    @field_validator("betas")
    @classmethod
    def _decay(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"both must be at least 0 and below 1, got {list(value)}")
        return value

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        for name, owner in OPTIMIZER_ONLY.items():
            if self.optimizer != owner and self._is_set(name):
                yield f"{name} has no effect with optimizer = {self.optimizer!r}; remove it"
        if self.optimizer == "sgd" and self.nesterov and self.momentum == 0:
            yield "nesterov needs momentum above 0, got 0.0; set momentum"


class CriticSettings(CriticLearning, OptimizerSettings):
    """The critic: a value head on its own backbone. All other settings are those of the policy."""


class FSDP(OptimizerSettings, LoRATrainerConfig):
    """PyTorch FSDP2 with Hugging Face models: parameters, gradients and optimizer state are sharded over the ranks.

    Weights and optimizer state are kept in fp32 and gradients are summed in fp32, regardless of `dtype`.
    """

    kind: Literal["fsdp"] = "fsdp"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of the forward and backward passes. ``auto`` is the engine's dtype if it is one of these, else
    bfloat16 on a GPU and float32 on a CPU."""
    activation_checkpointing: bool = False
    """Store only the input of each decoder layer for the backward pass and recompute its activations."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; each layer is copied to the GPU to compute."""
    shard_ranks: Annotated[int, Field(ge=1)] | None = None
    """Number of ranks over which each copy of the model is sharded (hybrid sharding, HSDP); must divide
    `placement.trainer_ranks`. Copies exchange only gradients; set it to the number of GPUs per machine to gather
    weights only within machines. By default there is one copy, sharded over all ranks."""
    context_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Context-parallel size: number of ranks, with consecutive numbers, that the tokens of each microbatch are split
    over; within attention, the heads are split instead. Must divide `placement.trainer_ranks` and the number of
    attention heads; requires attention = "auto" and a model without linear attention."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; ``auto`` packs samples without padding, ``sdpa`` and ``eager`` pad them."""
    share_prefixes: Literal["auto"] | bool = "auto"
    """Compute the common prefix of a group's samples once per microbatch. ``auto`` does so if it saves at least 20% of
    the group's tokens on a GPU, 5% on a CPU; requires attention = "auto" and models without linear attention."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the decoder layers with `torch.compile`; ``auto`` does so on a GPU with attention = "auto" and
    context_parallel = 1, for models without experts and linear attention. Linear attention cannot be compiled."""
    activation_memory_budget: float = Field(1.0, ge=0, le=1)
    """Fraction of the activations of compiled layers that is kept for the backward pass; the others are recomputed, the
    cheapest first (selective activation checkpointing). 0 keeps only the inputs of layers."""
    async_save: Annotated[bool, MAY_CHANGE] = False
    """Write checkpoints in the background, from a copy in host memory, while training continues."""
    critic: CriticSettings = CriticSettings()
    """Optimizer and initial weights of the critic, for algorithms that have one."""

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.routing_replay and self.compile is True:
            yield "compile must be 'auto' or false with routing_replay, which changes the routers' choices"
        if self.activation_memory_budget < 1 and self.activation_checkpointing:
            yield "activation_memory_budget has no effect with activation_checkpointing = true; remove one of them"
        if self.activation_memory_budget < 1 and self.compile is False:
            yield "activation_memory_budget needs compiled layers; remove it, or compile = false"
        if self.share_prefixes is True and self.attention != "auto":
            yield f"share_prefixes needs attention = 'auto', got {self.attention!r}: padded samples share no tokens"
        if self.context_parallel > 1 and self.attention != "auto":
            yield f"context_parallel needs attention = 'auto', got {self.attention!r}, which attends to padded samples"
        if recipe is not None and recipe.deterministic:
            yield from self._find_variant_settings(recipe.key)

    def _find_variant_settings(self, key: str) -> Iterator[str]:
        """Yield settings that select kernels whose results depend on the batch."""
        for name in ("compile", "share_prefixes"):
            if getattr(self, name) is True:
                yield f"{key}.{name}: must be 'auto' or false with run.deterministic, got true; remove it"
        if self.attention != "auto":
            yield f"{key}.attention: must be 'auto' with run.deterministic, got {self.attention!r}; remove it"
        if self.context_parallel > 1:
            yield f"{key}.context_parallel: must be 1 with run.deterministic, got {self.context_parallel}; remove it"

    def is_batch_invariant(self) -> bool:
        return True

    def places_roles(self) -> bool:
        return True

    def num_parts(self, ranks: int) -> int:
        """Return the number of context-parallel groups. Raises ValueError if ``ranks`` cannot be split into them."""
        if ranks % self.context_parallel:
            raise ValueError(
                f"{ranks} ranks cannot be split into groups of {self.context_parallel} (trainer.context_parallel)"
            )
        return ranks // self.context_parallel

    def context_obstacle(self, model: Mapping[str, Any]) -> str | None:
        """Return why ranks cannot split the tokens of the model with this configuration; None if they can."""
        if self.context_parallel == 1:
            return None
        if has_linear_attention(model):
            return "cannot be used with linear attention, whose state runs through all tokens of a sample"
        heads = model.get("num_attention_heads")
        if isinstance(heads, int) and heads % self.context_parallel:
            return f"must divide the model's num_attention_heads = {heads}, got {self.context_parallel}"
        rotary = str(model.get("rope_parameters") or model.get("rope_scaling"))
        for name in BY_LENGTH:
            if name in rotary:
                return f"cannot be used with rotary positions of type {name!r}, which depend on a sequence's length"
        return None

    def uses_linear_attention(self, models: Mapping[str, str]) -> bool:
        """Return True if one of the models, given by table, has linear attention.

        Raises `ConfigError` for settings that it does not support.
        """
        for where, folder in models.items():
            if not has_linear_attention(read_text_config(where, Path(folder))):
                continue
            for name, reason in NOT_WITH_LINEAR_ATTENTION.items():
                if getattr(self, name) is True:
                    raise ConfigError(
                        f"trainer.{name}: must be 'auto' or false for models with linear attention, {reason}, got true "
                        f"({where}.path = {folder}); remove it"
                    )
            return True
        return False

    def saves_without_optimizer(self) -> bool:
        return True

    def saved_bytes_per_weight(self, *, optimizer: bool) -> int:
        state = {"adamw": 8, "sgd": 4 if self.momentum else 0}[self.optimizer]
        return 4 + (state if optimizer and not self.freeze else 0)  # all in fp32; frozen weights have no state

    def check(self, recipe: RecipeView) -> None:
        """Check the model folders and the settings that need a GPU. Raises `ConfigError` or `ModelError`."""
        if self.cpu_offload and recipe.placement.device == "cpu":
            raise ConfigError(CPU_OFFLOAD_ERROR)
        if self.activation_memory_budget < 1 and self.compile == "auto" and recipe.placement.device == "cpu":
            raise ConfigError(NOT_COMPILED_ERROR)
        place = recipe.placement
        counts = {"trainer": place.trainer_ranks} | {role.value: count for role, count in place.role_ranks.items()}
        for name, ranks in counts.items():
            if self.shard_ranks is not None and ranks % self.shard_ranks:
                raise ConfigError(
                    f"trainer.shard_ranks: must divide placement.{name}_ranks = {ranks}, got {self.shard_ranks}"
                )
        check_models(recipe)
        for where, folder in recipe.needed_models.items():
            if obstacle := self.context_obstacle(read_text_config(where, Path(folder))):
                raise ConfigError(f"trainer.context_parallel: {obstacle} ({where}.path = {folder})")
        self.uses_linear_attention(recipe.needed_models)
        check_routing_replay(self, recipe.model.path)
        check_invariant_models(recipe)
        self.check_start(recipe)

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        from .estimate import estimate

        return estimate(self, context)

    def estimate_dedicated(self, context: EstimateContext, role: Role) -> Sequence[PhaseEstimate]:
        from .estimate import FSDPEstimate

        return list(FSDPEstimate(self, context, role).dedicated_phases())

    async def build(self, context: BuildContext) -> Trainer:
        """Start one process per rank. Raises `ConfigError` or `ModelError`, if possible before starting any."""
        from .trainer import start

        return await start(self, context)
