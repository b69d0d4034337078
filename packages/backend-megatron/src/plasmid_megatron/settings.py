"""The settings of the Megatron trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from plasmid.components import BuildContext, PlanRow, RecipeView
from plasmid.errors import ConfigError
from plasmid.protocols import Trainer
from plasmid.settings.resume import MAY_CHANGE
from plasmid.types import Role
from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.linear_attention import has_linear_attention
from plasmid_training.learning_settings import NOT_COMPILED_ERROR
from plasmid_training.lora_settings import LoRATrainerConfig
from pydantic import Field, field_validator

from .upstream.fields import check_fields

OWNED = {
    "tensor_model_parallel_size": "tensor_parallel",
    "pipeline_model_parallel_size": "pipeline_parallel",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_parallel",
    "expert_tensor_parallel_size": "expert_tensor_parallel",
    "sequence_parallel": "sequence_parallel",
    "params_dtype": "dtype",
    "pipeline_dtype": "dtype",
    "bf16": "dtype",
    "transformer_impl": "transformer_engine",
    "lr": "lr",
    "weight_decay": "weight_decay",
    "clip_grad": "max_grad_norm",
    "min_lr": "min_lr_fraction",
    "overlap_param_gather": "overlap_param_gather",
}
"""Fields of Megatron's configuration that Plasmid sets, and the setting that each follows from."""
NOT_SUPPORTED = {
    "fp16": "computes in float32 or bfloat16",
    "fp8": "computes in float32 or bfloat16",
    "fp4": "computes in float32 or bfloat16",
    "calculate_per_token_loss": "weighs token losses itself",
    "variable_seq_lengths": "packs microbatches of any length",
    "attention_dropout": "trains without dropout, as the engine samples without",
    "hidden_dropout": "trains without dropout, as the engine samples without",
    "softmax_type": "takes attention sinks from the model",
    "mtp_num_layers": "does not train multi-token prediction layers",
    "hybrid_context_parallel": "has one layout of context parallelism",
    "overlap_param_gather_with_optimizer_step": "gathers parameters in the forward pass",
}
TRANSFORMER_ENGINE_FIELDS = ("moe_grouped_gemm", "moe_permute_fusion", "use_te_activation_func")
"""Fields of Megatron's configuration that have an effect with TransformerEngine only."""
COUNT_TOKENS = (
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_expert_capacity_factor",
    "moe_router_bias_update_rate",
)
"""Fields of Megatron's configuration that make experts depend on the number of tokens in a microbatch."""
Fields = dict[str, bool | int | float | str | list[Any] | dict[str, Any]]
"""String values are not inert (`plasmid.settings.trust`): some name a function or a folder to write to."""


class Megatron(LoRATrainerConfig):
    """Megatron-Core: tensor, pipeline, context, expert and data parallelism.

    The architecture is read from the model folder's ``config.json``. `placement.trainer_ranks` must be a multiple of
    tensor_parallel x pipeline_parallel x context_parallel; the quotient is the data-parallel size.
    """

    kind: Literal["megatron"] = "megatron"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of weights and computation; with bfloat16 the optimizer keeps fp32 copies of the weights, and gradients are
    fp32. ``auto`` is the engine's dtype if it is one of these, else bfloat16 on a GPU and float32 on a CPU."""
    tensor_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Tensor-parallel size: number of ranks that each weight matrix is split over."""
    pipeline_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Pipeline-parallel size: number of ranks that the layers are split over."""
    virtual_pipeline: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Number of model chunks per pipeline rank; more than 1 selects the interleaved schedule, with less idle time."""
    context_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Context-parallel size: number of ranks that the tokens of each sequence are split over; within attention, the
    heads are split instead."""
    expert_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Expert-parallel size: number of ranks that the experts of a mixture-of-experts layer are split over."""
    expert_tensor_parallel: Annotated[Literal["auto"] | int, MAY_CHANGE] = "auto"
    """Number of ranks that the matrices of each expert are split over; ``auto`` is tensor_parallel."""
    sequence_parallel: Annotated[Literal["auto"] | bool, MAY_CHANGE] = "auto"
    """Split activations outside of the tensor-parallel matrices by tokens over the tensor-parallel ranks (sequence
    parallelism); ``auto`` is true if tensor_parallel is more than 1."""
    distributed_optimizer: bool = True
    """Split the optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: Annotated[bool, MAY_CHANGE] = False
    """Sum the gradients of data-parallel ranks bucket by bucket, in the last microbatch of a step, while its backward
    pass computes the next ones. Sums may then be rounded differently."""
    overlap_param_gather: Annotated[bool, MAY_CHANGE] = False
    """Gather the parameters that a step has changed bucket by bucket, while the next forward pass computes; requires
    overlap_grad_reduce and distributed_optimizer."""
    transformer_engine: bool = False
    """Build layers from TransformerEngine's modules; requires the package. Written against its API, but never run."""
    share_prefixes: Literal["auto"] | bool = "auto"
    """Compute the common prefix of a group's samples once per microbatch. ``auto`` does so if it saves at least 20% of
    the group's tokens on a GPU, 5% on a CPU; requires context_parallel = 1 and a model without latent or linear
    attention."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the decoder layers with `torch.compile`; ``auto`` does so on a GPU with tensor_parallel = 1 and
    context_parallel = 1, for models without experts and linear attention, and not with transformer_engine."""
    activation_memory_budget: float = Field(1.0, ge=0, le=1)
    """Fraction of the activations of compiled layers that is kept for the backward pass; the others are recomputed, the
    cheapest first (selective activation checkpointing). 0 keeps only the inputs of layers."""
    async_save: Annotated[bool, MAY_CHANGE] = False
    """Write checkpoints in the background, from a copy in host memory, while training continues."""
    transformer: Fields = Field(default_factory=dict)
    """Fields of Megatron's `TransformerConfig`, by name: recompute_granularity, moe_aux_loss_coeff, ..."""
    optimizer: Fields = Field(default_factory=dict)
    """Fields of Megatron's `OptimizerConfig`, by name: optimizer, adam_beta2, sgd_momentum, ..."""

    @property
    def chunks_per_stage(self) -> int | None:
        """virtual_pipeline as Megatron expects it: None for 1."""
        return self.virtual_pipeline if self.virtual_pipeline > 1 else None

    @property
    def expert_tensor_size(self) -> int:
        """expert_tensor_parallel with ``auto`` resolved."""
        return self.tensor_parallel if self.expert_tensor_parallel == "auto" else self.expert_tensor_parallel

    @property
    def splits_sequences(self) -> bool:
        """sequence_parallel with ``auto`` resolved."""
        return self.tensor_parallel > 1 if self.sequence_parallel == "auto" else self.sequence_parallel

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks of one model replica."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @field_validator("transformer", "optimizer")
    @classmethod
    def _check_fields(cls, value: Fields, info: Any) -> Fields:
        for name in value:
            if name in OWNED:
                raise ValueError(f"{name} follows from trainer.{OWNED[name]}; set that")
            if name in NOT_SUPPORTED:
                raise ValueError(f"{name} cannot be set: trainer 'megatron' {NOT_SUPPORTED[name]}")
        if value:
            check_fields(info.field_name, value)
        return value

    def find_errors(self, recipe: RecipeView | None) -> Iterator[str]:
        yield from super().find_errors(recipe)
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            yield f"virtual_pipeline = {self.virtual_pipeline} has no effect with pipeline_parallel = 1; remove it"
        if self.sequence_parallel is True and self.tensor_parallel == 1:
            yield "sequence_parallel has no effect with tensor_parallel = 1; remove it"
        if self.expert_parallel > 1 and self.tensor_parallel > 1 and not self.splits_sequences:
            yield "expert_parallel with tensor_parallel needs sequence_parallel; remove sequence_parallel = false"
        if self.distributed_optimizer and self.optimizer.get("optimizer", "adam") != "adam":
            yield "distributed_optimizer works with optimizer = 'adam' only; set distributed_optimizer = false"
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield "overlap_param_gather needs overlap_grad_reduce = true"
        if self.overlap_param_gather and not self.distributed_optimizer:
            yield "overlap_param_gather has no effect with distributed_optimizer = false; remove it"
        if self.transformer_engine and self.dtype != "bfloat16":
            yield f"transformer_engine = true needs dtype = 'bfloat16' for packed attention, got {self.dtype!r}"
        if self.transformer_engine and self.compile is True:
            yield "compile = true needs transformer_engine = false"
        if self.activation_memory_budget < 1 and self.transformer.get("recompute_granularity"):
            yield "activation_memory_budget has no effect with transformer.recompute_granularity; remove one of them"
        if self.activation_memory_budget < 1 and self.compile is False:
            yield "activation_memory_budget needs compiled layers; remove it, or compile = false"
        if self.transformer_engine and self.lora is not None:
            yield "lora needs transformer_engine = false: layers of TransformerEngine cannot have an adapter"
        if self.lora is not None and self.transformer.get("moe_shared_expert_overlap"):
            yield "lora needs transformer.moe_shared_expert_overlap = false, which splits the layers of shared experts"
        for name in () if self.transformer_engine else TRANSFORMER_ENGINE_FIELDS:
            if self.transformer.get(name):
                yield f"transformer.{name} = true needs transformer_engine = true"
        if self.routing_replay and self.pipeline_parallel > 1 and self.transformer.get("recompute_granularity"):
            yield (
                "transformer.recompute_granularity does not work with routing_replay and pipeline_parallel > 1: layers "
                "are recomputed after the experts of later microbatches were set; remove one of them"
            )
        if self.routing_replay and self.transformer.get("moe_router_fusion"):
            yield "transformer.moe_router_fusion does not work with routing_replay: the fused router cannot replay"
        if "use_distributed_optimizer" in self.optimizer:
            yield "optimizer.use_distributed_optimizer follows from distributed_optimizer; set that"

    def sharing_obstacle(self, model: Mapping[str, Any]) -> str | None:
        """Return why samples of the model with this ``config.json`` cannot share prefixes; None if they can."""
        if self.context_parallel > 1:
            return f"needs context_parallel = 1, got {self.context_parallel}"
        if self.transformer_engine:
            return "needs transformer_engine = false"
        if model.get("kv_lora_rank"):
            return "needs a model without latent attention"
        if has_linear_attention(model):
            return "needs a model without linear attention"
        for name in COUNT_TOKENS:
            if self.transformer.get(name):
                return (
                    f"cannot be used with transformer.{name}, which counts tokens: shared tokens would be counted only "
                    "once"
                )
        return None

    def num_parts(self, ranks: int) -> int:
        """Return the number of model replicas.

        Raises ValueError if ``ranks`` is not a multiple of the ranks of a replica, or of a group of experts.
        """
        replica, experts = (
            self.ranks_per_replica,
            self.expert_parallel * self.expert_tensor_size * self.pipeline_parallel,
        )
        if ranks % replica:
            raise ValueError(
                f"{ranks} ranks cannot be split into model replicas of {replica} "
                "(trainer.tensor_parallel x pipeline_parallel x context_parallel)"
            )
        if self.expert_parallel > 1 and ranks % experts:
            raise ValueError(
                f"{ranks} ranks cannot be split into expert-parallel groups of {experts} "
                "(trainer.expert_parallel x expert_tensor_parallel x pipeline_parallel)"
            )
        return ranks // replica

    def places_roles(self) -> bool:
        return True

    def saved_bytes_per_weight(self, *, optimizer: bool) -> int:
        return 12 if self.optimizer.get("optimizer", "adam") == "adam" else 4  # weights and two averages in fp32

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        from .shapes import plan

        return plan(self, model, ranks)

    def packages(self) -> Mapping[str, str]:
        return {"megatron.core": "plasmid-megatron"}

    def check(self, recipe: RecipeView) -> None:
        """Check the model folders and the settings that need a GPU. Raises `ConfigError` or `ModelError`."""
        from .trainer import check

        if self.activation_memory_budget < 1 and self.compile == "auto" and recipe.placement.device == "cpu":
            raise ConfigError(NOT_COMPILED_ERROR)
        check(self, recipe, "cpu" if recipe.placement.device == "cpu" else None)

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        from .estimate import estimate

        return estimate(self, context)

    def estimate_dedicated(self, context: EstimateContext, role: Role) -> Sequence[PhaseEstimate]:
        from .estimate import MegatronEstimate

        return list(MegatronEstimate(self, context, role).dedicated_phases())

    async def build(self, context: BuildContext) -> Trainer:
        """Start one process per rank. Raises `ConfigError` or `ModelError`, if possible before starting any."""
        from .trainer import start

        return await start(self, context)
