"""The settings of the Megatron trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from plasmid import RunConfig
from plasmid.components import Algorithm, BuildContext, PlanRow, TrainerConfig
from plasmid.protocols import Trainer
from plasmid.settings.resume import MAY_CHANGE
from plasmid_training.learning_settings import CriticLearning, LearningSettings
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
}
"""Fields of Megatron that follow from settings of ours, and which."""
NOT_SUPPORTED = {
    "fp16": "computes in float32 or bfloat16",
    "fp8": "computes in float32 or bfloat16",
    "fp4": "computes in float32 or bfloat16",
    "calculate_per_token_loss": "weighs token losses itself",
    "variable_seq_lengths": "packs microbatches of any length",
    "attention_dropout": "trains without dropout, as the engine samples without",
    "hidden_dropout": "trains without dropout, as the engine samples without",
    "mtp_num_layers": "trains no layers that predict further tokens",
    "hybrid_context_parallel": "has one layout of context parallelism",
}
OF_ENGINE = ("moe_grouped_gemm", "moe_permute_fusion", "use_te_activation_func")
"""Fields of Megatron that it reads with TransformerEngine only."""
Fields = dict[str, bool | int | float | str | list[Any] | dict[str, Any]]
"""Texts among them are not inert (`plasmid.settings.trust`): some name a folder to write to or a function."""


class Megatron(LearningSettings, TrainerConfig):
    """Megatron-Core: models split over ranks by tensors, layers, tokens and experts.

    The architecture follows from the model folder's ``config.json``. Ranks that remain are data-parallel:
    `placement.trainer_ranks` must be a multiple of tensor_parallel x pipeline_parallel x context_parallel.
    """

    kind: Literal["megatron"] = "megatron"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What weights are kept in and computed with; with bfloat16 the optimizer keeps fp32 copies, gradients are fp32.
    ``auto`` is what the engine computes in, as far as it is one of these."""
    tensor_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Ranks that every weight matrix is split over."""
    pipeline_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Ranks that the layers are split over."""
    virtual_pipeline: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Groups of layers on each pipeline rank; more than 1 interleaves them, so that ranks wait less for each other."""
    context_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Ranks that the tokens of every sequence are split over; attention splits the heads instead."""
    expert_parallel: Annotated[int, MAY_CHANGE] = Field(1, ge=1)
    """Ranks that the experts of a mixture-of-experts layer are split over."""
    expert_tensor_parallel: Annotated[Literal["auto"] | int, MAY_CHANGE] = "auto"
    """Ranks that every expert's matrices are split over; ``auto`` is tensor_parallel."""
    sequence_parallel: Annotated[Literal["auto"] | bool, MAY_CHANGE] = "auto"
    """Split what lies between the matrices over the ranks of tensor_parallel, too; ``auto`` where there are several."""
    distributed_optimizer: bool = True
    """Split the optimizer's state over the data-parallel ranks."""
    microbatch_tokens: int = Field(16384, ge=1)
    """Longest microbatch of one model replica in tokens, packed without padding; a longer sample travels alone."""
    microbatch_samples: Literal["auto"] | int = "auto"
    """Fixed number of samples in a microbatch; ``auto`` fills microbatches up to `microbatch_tokens`."""
    logprob_chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Tokens whose logits exist at one time; ``auto`` lets them take 1.25 GiB on a GPU and 128 MiB on a CPU."""
    transformer_engine: bool = False
    """Make layers of TransformerEngine's modules, which must be installed: written against its API, and never run."""
    async_save: Annotated[bool, MAY_CHANGE] = False
    """Write checkpoints while training goes on, from a copy in host memory."""
    transformer: Fields = Field(default_factory=dict)
    """Fields of Megatron's `TransformerConfig`, by their names there: recompute_granularity, moe_aux_loss_coeff, ..."""
    optimizer: Fields = Field(default_factory=dict)
    """Fields of Megatron's `OptimizerConfig`, by their names there: optimizer, adam_beta2, sgd_momentum, ..."""
    critic: CriticLearning = CriticLearning()
    """Learning rate and first weights of the critic, for algorithms that have one."""

    @property
    def chunks_per_stage(self) -> int | None:
        """As Megatron wants to be told: None where pipeline ranks have one group of layers."""
        return self.virtual_pipeline if self.virtual_pipeline > 1 else None

    @property
    def expert_tensor_size(self) -> int:
        """expert_tensor_parallel as a number."""
        return self.tensor_parallel if self.expert_tensor_parallel == "auto" else self.expert_tensor_parallel

    @property
    def splits_sequences(self) -> bool:
        """sequence_parallel as True or False."""
        return self.tensor_parallel > 1 if self.sequence_parallel == "auto" else self.sequence_parallel

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that hold one model together."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @field_validator("transformer", "optimizer")
    @classmethod
    def _known_upstream(cls, value: Fields, info: Any) -> Fields:
        for name in value:
            if name in OWNED:
                raise ValueError(f"{name} follows from trainer.{OWNED[name]}; set that")
            if name in NOT_SUPPORTED:
                raise ValueError(f"{name} cannot be set: trainer 'megatron' {NOT_SUPPORTED[name]}")
        if value:
            check_fields(info.field_name, value)
        return value

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.microbatch_samples != "auto" and self._is_set("microbatch_tokens"):
            yield "microbatch_tokens has no effect where microbatch_samples is set; remove one of them"
        if isinstance(self.microbatch_samples, int) and self.microbatch_samples < 1:
            yield f"microbatch_samples must be 'auto' or at least 1, got {self.microbatch_samples}"
        if self.virtual_pipeline > 1 and self.pipeline_parallel == 1:
            yield f"virtual_pipeline = {self.virtual_pipeline} has no effect with pipeline_parallel = 1"
        if self.sequence_parallel is True and self.tensor_parallel == 1:
            yield "sequence_parallel has no effect with tensor_parallel = 1; remove it"
        if self.expert_parallel > 1 and self.tensor_parallel > 1 and not self.splits_sequences:
            yield "expert_parallel with tensor_parallel needs sequence_parallel; remove sequence_parallel = false"
        if self.distributed_optimizer and self.optimizer.get("optimizer", "adam") != "adam":
            yield "distributed_optimizer works with optimizer = 'adam' only; set distributed_optimizer = false"
        if self.transformer_engine and self.dtype != "bfloat16":
            yield f"transformer_engine = true needs dtype = 'bfloat16' for its packed attention, got {self.dtype!r}"
        for name in () if self.transformer_engine else OF_ENGINE:
            if self.transformer.get(name):
                yield f"transformer.{name} = true needs transformer_engine = true"
        if "use_distributed_optimizer" in self.optimizer:
            yield "optimizer.use_distributed_optimizer follows from distributed_optimizer; set that"

    def mistakes(self, algorithm: Algorithm) -> Iterator[str]:
        """A critic's settings without a critic."""
        if self.critic != CriticLearning() and not algorithm.needs().critic:
            yield "trainer.critic: the algorithm has no critic, so it is never read; remove the table"

    def num_parts(self, ranks: int) -> int:
        """Model replicas. Raises ValueError if the ranks do not divide into them, or not into groups of experts."""
        replica, experts = (
            self.ranks_per_replica,
            self.expert_parallel * self.expert_tensor_size * self.pipeline_parallel,
        )
        if ranks % replica:
            raise ValueError(
                f"{ranks} do not divide into model replicas of {replica} ranks "
                "(trainer.tensor_parallel x pipeline_parallel x context_parallel)"
            )
        if self.expert_parallel > 1 and ranks % experts:
            raise ValueError(
                f"{ranks} do not divide into groups of {experts} ranks that hold all experts "
                "(trainer.expert_parallel x expert_tensor_parallel x pipeline_parallel)"
            )
        return ranks // replica

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        from .shapes import plan

        return plan(self, model, ranks)

    def packages(self) -> Mapping[str, str]:
        return {"megatron.core": "plasmid-megatron"}

    def check(self, config: RunConfig) -> None:
        """The folders of models, and what needs a GPU."""
        from .trainer import check

        check(self, config, "cpu" if config.placement.device == "cpu" else None)

    async def build(self, context: BuildContext) -> Trainer:
        """Start one process for each rank. Raises `ConfigError` or `ModelError` before any is started, where it can."""
        from .trainer import start

        return await start(self, context)
