"""Estimates of memory and time per phase on the fullest rank of trainer 'megatron'. Imports no torch.

They are based on ``config.json``. Only one layout was measured, one GPU without recomputation (`docs/design/plan.md`);
the split over ranks follows Megatron's rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from plasmid.types import Role
from plasmid.types.estimates import EstimateContext, PhaseEstimate
from plasmid_models.estimates.shape import ModelShape
from plasmid_training.estimates.activations import Activations, Attention, has_dense_blocks, head_memory
from plasmid_training.estimates.speed import (
    MICROBATCH_S,
    SCORING,
    Passes,
    compute_seconds,
    link_rate,
    optimizer_seconds,
)
from plasmid_training.teacher_settings import find_computed_roles

from .settings import Megatron
from .shapes import check_split, layers_of_stages

FP32 = 4
RESIDUALS = 4.0
"""Activations that Megatron's unfused layers keep beyond those of transformers, in multiples of the hidden size."""
OFFLOAD_RATE, ONLOAD_RATE = 15e9, 33e9
"""Bytes per second between GPU and pinned memory, measured on an H200 (`docs/performance.md`)."""


def estimate(settings: Megatron, context: EstimateContext) -> list[PhaseEstimate]:
    """Return the phases of one batch. Raises `ConfigError` for unknown models, or if the model cannot be split."""
    check_split(settings, context.models["model"])
    return list(MegatronEstimate(settings, context).phases())


@dataclass(frozen=True)
class MegatronEstimate:
    """Estimate for the rank that needs the most memory."""

    settings: Megatron
    context: EstimateContext
    role: Role = Role.POLICY
    """Model on these ranks, if it has its own; ``POLICY`` for the trainer's ranks, which may have other models, too."""

    @cached_property
    def shape(self) -> ModelShape:
        """Shape of the policy, or of the model on dedicated ranks."""
        return ModelShape.of(self.context.models["model"])

    @cached_property
    def dtype_bytes(self) -> int:
        """Bytes per weight."""
        dtype = self.settings.dtype
        if dtype == "auto":
            dtype = getattr(self.context.config.rollout, "dtype", "auto")
        return 2 if dtype == "bfloat16" or (dtype == "auto" and self.context.on_gpu) else 4

    @property
    def replicas(self) -> int:
        """Number of model replicas."""
        return self.settings.num_parts(self.context.config.placement.trainer_ranks)

    @cached_property
    def stages(self) -> list[int]:
        """Number of layers of each pipeline rank."""
        parts = self.settings.pipeline_parallel
        return layers_of_stages(self.settings, self.context.models["model"]) or [-(-self.shape.layers // parts)] * parts

    @property
    def recomputes_layers(self) -> bool:
        """Whether whole layers are recomputed in the backward pass."""
        return self.settings.transformer.get("recompute_granularity") == "full"

    @cached_property
    def microbatch(self) -> float:
        """Tokens in the largest microbatch of a replica."""
        load, fixed = self.context.load, self.settings.microbatch_samples
        if isinstance(fixed, int):
            return float(fixed * load.longest)
        step = load.tokens / load.steps / self.replicas
        return float(max(min(self.settings.microbatch_tokens, step), load.longest))

    @property
    def microbatches(self) -> int:
        """Number of microbatches per optimizer step."""
        load = self.context.load
        return max(1, -(-int(load.tokens / load.steps / self.replicas) // int(self.microbatch)))

    @property
    def activations(self) -> Activations:
        """Activation memory of the layers."""
        settings = self.settings
        splits = settings.tensor_parallel > 1 or settings.context_parallel > 1 or settings.transformer_engine
        automatic = self.context.on_gpu and not splits and not self.shape.experts and not self.shape.linear
        compiled = automatic if settings.compile == "auto" else settings.compile
        extra = 0.0 if compiled else RESIDUALS
        packed = settings.context_parallel > 1 or settings.transformer_engine or bool(self.shape.experts)
        attention: Attention = "packed" if packed or not has_dense_blocks(self.context.load) else "dense"
        return Activations(
            shape=self.shape,
            dtype_bytes=self.dtype_bytes,
            compiled=compiled,
            attention=attention,
            extra=extra,
            budget=settings.activation_memory_budget if compiled else 1.0,
        )

    def rank_parameters(self, stage: int) -> tuple[float, float]:
        """Return the numbers of non-expert and expert weights on a rank of a pipeline stage."""
        shape, settings = self.shape, self.settings
        last = stage == len(self.stages) - 1
        share = self.stages[stage] / shape.layers
        outside = shape.parameters - shape.expert_parameters - shape.embedding * (1 if shape.tied else 2)
        # a tied embedding is on the first and on the last stage
        ends = shape.embedding * ((stage == 0) + (last and not (shape.tied and stage == 0)))
        experts = shape.expert_parameters * share / (settings.expert_parallel * settings.expert_tensor_size)
        return (outside * share + ends) / settings.tensor_parallel, experts

    @cached_property
    def adapter_parameters(self) -> tuple[int, int] | None:
        """Numbers of non-expert and expert parameters of the adapter; None if the weights are trained."""
        lora = None if self.role is Role.CRITIC else self.settings.lora
        if lora is None:
            return None
        whole = self.shape.adapter_parameters(lora.rank, lora.targets)
        experts = self.shape.adapter_parameters(lora.rank, lora.targets, experts=True)
        return whole - experts, experts

    def states(self, stage: int) -> dict[str, float]:
        """Return the bytes of weights, gradients and optimizer state on a rank of a stage."""
        settings = self.settings
        dense, experts = self.rank_parameters(stage)
        if self.adapter_parameters is not None:
            return self.adapter_states(stage, dense + experts)
        masters = FP32 if self.dtype_bytes == 2 else 0
        adam = 2 * FP32 if settings.optimizer.get("optimizer", "adam") == "adam" else FP32
        return {
            "weights": (dense + experts) * self.dtype_bytes,
            "gradients": (dense + experts) * FP32,
            "optimizer": self.optimizer_share(dense, experts) * (masters + adam),
        }

    def adapter_states(self, stage: int, base: float) -> dict[str, float]:
        """Return the same bytes for an adapter in fp32 and its frozen base, of which the rank has ``base`` weights."""
        settings = self.settings
        share = self.stages[stage] / self.shape.layers
        of_dense, of_experts = self.adapter_parameters or (0, 0)
        # the matrix that is whole on every rank is the smaller part
        dense, experts = share * of_dense / settings.tensor_parallel, share * of_experts / settings.expert_parallel
        adam = 2 * FP32 if settings.optimizer.get("optimizer", "adam") == "adam" else FP32
        return {
            "weights": base * self.dtype_bytes + (dense + experts) * FP32,
            "gradients": (dense + experts) * FP32,
            "optimizer": self.optimizer_share(dense, experts) * adam,
        }

    def optimizer_share(self, dense: float, experts: float) -> float:
        """Return the number of weights whose optimizer state a rank keeps, from those of its two kinds of weights."""
        settings = self.settings
        if not settings.distributed_optimizer:
            return dense + experts
        ranks = self.context.config.placement.trainer_ranks
        copies = ranks // (settings.expert_parallel * settings.expert_tensor_size * settings.pipeline_parallel)
        return dense / (self.replicas * settings.context_parallel) + experts / max(1, copies)

    def working_memory(self, stage: int, *, train: bool) -> dict[str, float]:
        """Return the bytes that a microbatch needs on a rank of a stage."""
        settings, activations = self.settings, self.activations
        tokens = self.microbatch / settings.context_parallel
        split = settings.tensor_parallel if settings.splits_sequences else 1
        whole = 0.0
        if not settings.splits_sequences:  # norms and residuals are replicated on every rank
            whole = activations.boundaries(tokens, 6 + RESIDUALS) * (1 - 1 / settings.tensor_parallel)
        largest = activations.layer(tokens) / settings.tensor_parallel + whole
        mean = activations.layers(tokens) / self.shape.layers / settings.tensor_parallel + whole
        flying = min(len(self.stages) - stage, self.microbatches)
        if not train:
            kept = {"activations": largest}
        elif self.recomputes_layers:
            kept = {
                "activations": flying * activations.boundaries(tokens, self.stages[stage]) / split,
                "one layer computed again": largest,
            }
        else:
            kept = {"activations": flying * self.stages[stage] * mean}
        if stage < len(self.stages) - 1 or self.role is Role.CRITIC:  # a value head has one column
            return kept
        chunk = settings.logprob_chunk
        head = head_memory(
            self.shape,
            tokens,
            dtype_bytes=self.dtype_bytes,
            chunk=None if chunk == "auto" else chunk,
            trained=train and settings.lora is None,
            parts=settings.tensor_parallel,
            on_gpu=self.context.on_gpu,
        )
        again = kept.get("one layer computed again", 0.0)
        if again and again > sum(head.values()):
            return kept
        return {name: size for name, size in kept.items() if name != "one layer computed again"} | dict(head)

    def peak_memory(self, *, train: bool) -> dict[str, float]:
        """Return the bytes on a rank of the stage that needs the most memory."""
        found = [self.states(stage) | self.working_memory(stage, train=train) for stage in range(len(self.stages))]
        return max(found, key=lambda memory: sum(memory.values()))

    def dedicated_phases(self) -> Iterator[PhaseEstimate]:
        """Yield the phases of a model on dedicated ranks: score, and train for a critic."""
        seconds = None if self.context.device is None else self.seconds(SCORING, steps=0)
        if self.role is Role.CRITIC:
            yield PhaseEstimate(phase="score", memory=self.peak_memory(train=False), seconds=seconds)
            yield PhaseEstimate(phase="train", memory=self.peak_memory(train=True), seconds=self.training_seconds())
            return
        weights = [sum(self.rank_parameters(stage)) * self.dtype_bytes for stage in range(len(self.stages))]
        found = [{"weights": w} | self.working_memory(stage, train=False) for stage, w in enumerate(weights)]
        memory = max(found, key=lambda part: sum(part.values()))
        yield PhaseEstimate(phase="score", memory=memory, seconds=seconds)

    def phases(self) -> Iterator[PhaseEstimate]:
        """Yield the phases idle, score, train and sync."""
        place, device = self.context.config.placement, self.context.device
        static = max((self.states(stage) for stage in range(len(self.stages))), key=lambda part: sum(part.values()))
        idle = {} if place.offload_trainer and device is not None else static
        total = f"{self.shape.parameters / 1e6:,.1f} M"
        adapter = self.adapter_parameters
        facts = {"trained parameters": total if adapter is None else f"{sum(adapter) / 1e6:,.1f} M of {total}"}
        if "critic" in self.context.models:
            facts["critic"] = "not included in the memory estimate"
        yield PhaseEstimate(phase="idle", memory=idle, facts=facts)
        load = self.context.load
        roles = find_computed_roles(self.context.config, steps=load.steps)
        if roles:
            seconds = None if device is None else len(roles) * self.seconds(SCORING, steps=0)
            names = ", ".join(role.value for role in roles)
            yield PhaseEstimate(
                phase="score", memory=self.peak_memory(train=False), seconds=seconds, basis=f"forward passes of {names}"
            )
        seconds = self.training_seconds()
        basis = f"{load.steps} x {self.microbatches} microbatches of {int(self.microbatch):,} tokens at most"
        yield PhaseEstimate(phase="train", memory=self.peak_memory(train=True), seconds=seconds, basis=basis)
        if self.context.config.rollout is not None:
            bucket = getattr(self.context.config.rollout, "bucket_bytes", 0)
            moved = sum(static.values()) if not idle else 0.0
            seconds = moved * (1 / OFFLOAD_RATE + 1 / ONLOAD_RATE) if device is not None else None
            basis = "offload and onload of the trainer" if moved else ""
            yield PhaseEstimate(
                phase="sync", memory=static | {"buckets of the sync": 2.0 * bucket}, seconds=seconds, basis=basis
            )

    def training_seconds(self) -> float | None:
        """Return the seconds of all optimizer steps of a batch; None on a CPU."""
        if self.context.device is None:
            return None
        recomputed = 1.0 if self.recomputes_layers else 1 - self.activations.budget
        passes = Passes.training(recomputed=recomputed, adapter=self.adapter_parameters is not None)
        return self.seconds(passes, steps=self.context.load.steps)

    def seconds(self, passes: Passes, *, steps: int) -> float:
        """Return the seconds of a batch on the slowest rank, without the communication of expert parallelism."""
        device, load, settings = self.context.device, self.context.load, self.settings
        assert device is not None
        place = self.context.config.placement
        computed = compute_seconds(
            self.activations,
            device,
            tokens=load.tokens / self.replicas,
            sample_tokens=load.sample_tokens,
            passes=passes,
            parts=settings.ranks_per_replica,
        )
        bubble = 1 + (settings.pipeline_parallel - 1) / (self.microbatches * settings.virtual_pipeline)
        rate = link_rate(device, 1)
        reduced = 0.0
        if settings.tensor_parallel > 1:
            tokens = load.tokens / self.replicas / settings.context_parallel
            layers = self.shape.layers / settings.pipeline_parallel
            reduced = 2 * (passes.layers + 1) * layers * tokens * self.shape.hidden * self.dtype_bytes / rate
        trained = self.states(0)["gradients"] / FP32
        gradients = steps * trained * FP32 * 2 / link_rate(device, place.nodes) if self.replicas > 1 else 0.0
        updates = steps * optimizer_seconds(trained / max(1, self.replicas), device)
        return (computed + reduced) * bubble + gradients + updates + max(1, steps) * self.microbatches * MICROBATCH_S
