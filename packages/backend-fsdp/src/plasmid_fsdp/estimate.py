"""Estimates of memory and time per phase on one rank of trainer 'fsdp', from ``config.json``. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from plasmid.errors import ConfigError
from plasmid.types import Role
from plasmid.types.estimates import Accelerator, BatchLoad, EstimateContext, PhaseEstimate
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
from plasmid_training.lora_settings import LoRASettings
from plasmid_training.teacher_settings import find_computed_roles

from .settings import FSDP, OptimizerSettings

MASTER = 4
"""Bytes per weight of the fp32 weight, of its gradient, and of each of AdamW's averages."""
HOST_BANDWIDTH = 100e9
"""Host memory bandwidth for the optimizer of one rank, in bytes per second; not measured."""
OFFLOAD_RATE, ONLOAD_RATE = 15e9, 33e9
"""Bytes per second between GPU and pinned memory, measured on an H200 (`docs/performance.md`)."""


def estimate(settings: FSDP, context: EstimateContext) -> list[PhaseEstimate]:
    """Return the phases of one batch. Raises `ConfigError` for unknown models, or if ranks cannot split the tokens."""
    if obstacle := settings.context_obstacle(context.models["model"]):
        raise ConfigError(f"trainer.context_parallel: {obstacle}")
    return list(FSDPEstimate(settings, context).phases())


@dataclass(frozen=True)
class FSDPEstimate:
    """Estimate for one rank."""

    settings: FSDP
    context: EstimateContext
    role: Role = Role.POLICY
    """Model on these ranks, if it has its own; ``POLICY`` for the trainer's ranks, which may have other models, too."""

    @property
    def lora(self) -> LoRASettings | None:
        """The model's adapter."""
        return None if self.role is Role.CRITIC else self.settings.lora

    @cached_property
    def dtype_bytes(self) -> int:
        """Bytes per element in the compute dtype."""
        dtype: str = self.settings.dtype
        if dtype == "auto":
            of_engine = getattr(self.context.config.rollout, "dtype", "auto")
            dtype = of_engine if of_engine in ("float32", "bfloat16") else "auto"
        return 2 if dtype == "bfloat16" or (dtype == "auto" and self.context.on_gpu) else 4

    @cached_property
    def shape(self) -> ModelShape:
        """Shape of the policy, or of the model on dedicated ranks."""
        return ModelShape.of(self.context.models["model"])

    @property
    def ranks(self) -> int:
        """Number of ranks that the tokens are distributed over."""
        return self.context.config.placement.trainer_ranks

    @property
    def shards(self) -> int:
        """Number of ranks that each copy of a model is sharded over."""
        return self.settings.shard_ranks or self.ranks

    @property
    def makes_copies(self) -> bool:
        """True if trained models use `ComputeCopies` instead of FSDP2 (`uses_fsdp` in `model/building.py`)."""
        return self.ranks == 1 and not self.settings.cpu_offload

    @property
    def keeps_copies(self) -> bool:
        """True if the copies are kept while the trainer does not compute."""
        return self.makes_copies and not self.context.on_gpu

    @cached_property
    def microbatch(self) -> float:
        """Tokens of a rank in the largest microbatch, which the ranks of a context-parallel group split."""
        load, fixed, size = self.context.load, self.settings.microbatch_samples, self.settings.context_parallel
        if isinstance(fixed, int):
            return fixed * load.longest / size
        return max(min(self.settings.microbatch_tokens, self.tokens_per_step * size), load.longest) / size

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per rank and optimizer step."""
        load: BatchLoad = self.context.load
        return load.tokens / load.steps / self.ranks

    def activations(self, shape: ModelShape) -> Activations:
        """Return the activation memory of a model's layers."""
        compile_, packs = self.settings.compile, self.settings.attention == "auto"
        simple = not shape.experts and not shape.linear
        automatic = self.context.on_gpu and packs and simple and self.settings.context_parallel == 1
        dense = not packs or not self.context.on_gpu or has_dense_blocks(self.context.load)
        attention: Attention = "dense" if dense else "packed"
        compiled = automatic if compile_ == "auto" else compile_
        budget = self.settings.activation_memory_budget if compiled else 1.0
        return Activations(
            shape=shape, dtype_bytes=self.dtype_bytes, compiled=compiled, attention=attention, budget=budget
        )

    def phases(self) -> Iterator[PhaseEstimate]:
        """Yield the phases idle, score, train and sync."""
        policy, critic = self.states("model", self.settings), self.states("critic", self.settings.critic)
        trained = [states for states in (policy, critic) if states is not None]
        static = _sum([*trained, {} if self.context.on_gpu else self.host_copies()])
        on_gpu = {} if self.settings.cpu_offload else static
        idle = {} if self.context.config.placement.offload_trainer and self.context.on_gpu else on_gpu
        yield PhaseEstimate(phase="idle", memory=idle, facts=self.facts(static))
        seconds, basis = self.scoring()
        if seconds is not None:
            yield PhaseEstimate(phase="score", memory=on_gpu | self.forward_memory(), seconds=seconds, basis=basis)
        seconds = self.training_seconds()
        yield PhaseEstimate(
            phase="train", memory=on_gpu | self.backward_memory(), seconds=seconds, basis=self.describe_microbatches()
        )
        moved = 0.0 if not idle and self.context.on_gpu else None
        if self.context.config.rollout is not None:
            bucket = getattr(self.context.config.rollout, "bucket_bytes", 0)
            sent = {"buckets of the sync": 2.0 * bucket}
            rates = (1 / OFFLOAD_RATE + 1 / ONLOAD_RATE) if moved is not None else 0.0
            offload = sum(static.values()) * rates if not self.settings.cpu_offload else 0.0
            basis = "offload and onload of the trainer" if offload else ""
            yield PhaseEstimate(phase="sync", memory=on_gpu | sent, seconds=offload, basis=basis)

    def dedicated_phases(self) -> Iterator[PhaseEstimate]:
        """Yield the phases of a model on dedicated ranks: score, and train for a critic."""
        static, estimated = {"weights": self.shape.parameters * self.dtype_bytes / self.shards}, self.context.on_gpu
        if self.role is Role.CRITIC:
            static = self.state_bytes(self.shape, self.settings.critic)
        on_gpu = {"weights": 0.0} if self.settings.cpu_offload else static
        seconds = self.scoring_seconds(self.shape) if estimated else None
        yield PhaseEstimate(phase="score", memory=on_gpu | self.forward_memory(), seconds=seconds)
        if self.role is Role.CRITIC:
            seconds = self.model_seconds("model") if estimated else None
            yield PhaseEstimate(phase="train", memory=on_gpu | self.backward_memory(), seconds=seconds)

    def scoring_seconds(self, shape: ModelShape) -> float:
        """Return the seconds of the forward passes of one model before training."""
        return self.seconds_of(shape, SCORING, exchanges=1)

    def seconds_of(self, shape: ModelShape, passes: Passes, *, exchanges: float) -> float:
        """Return the seconds of ``passes`` over a rank's tokens, with ``exchanges`` among context-parallel ranks."""
        device, load = self.context.device, self.context.load
        assert device is not None
        computed = compute_seconds(
            self.activations(shape),
            device,
            tokens=load.tokens / self.ranks,
            sample_tokens=load.sample_tokens,
            passes=passes,
        )
        return computed + self.exchange_seconds(shape, device, passes=exchanges)

    def states(self, table: str, learning: OptimizerSettings) -> dict[str, float] | None:
        """Return the bytes of one model's weights and optimizer state on one rank; None if there is no such model."""
        if table not in self.context.models:
            return None
        lora = self.lora if table == "model" else None
        return self.state_bytes(ModelShape.of(self.context.models[table]), learning, lora)

    def state_bytes(
        self, shape: ModelShape, learning: OptimizerSettings, lora: LoRASettings | None = None
    ) -> dict[str, float]:
        """Return the bytes of the weights and the optimizer state on one rank of a model that is trained."""
        per_weight = {"adamw": 2 * MASTER, "sgd": MASTER if learning.momentum else 0}[learning.optimizer]
        if lora is not None:
            adapter = shape.adapter_parameters(lora.rank, lora.targets)
            weights, trained = shape.parameters * self.dtype_bytes + adapter * MASTER, float(adapter)
        else:
            weights, trained = shape.parameters * MASTER, count_trained_parameters(shape, learning.freeze)
        memory = {"weights": weights / self.shards, "optimizer": trained * per_weight / self.shards}
        if self.keeps_copies and self.dtype_bytes < MASTER:
            memory |= {
                "weights in compute dtype": self.copied_bytes(shape, lora),
                "gradient sums": trained * MASTER,
            }
        return memory

    def host_copies(self) -> dict[str, float]:
        """Return the bytes of frozen models, which GPUs keep on the host, and of a checkpoint that is being written."""
        config, models, frozen = self.context.config, self.context.models, 0.0
        for role in find_computed_roles(config, steps=self.context.load.steps):
            is_own = role.value not in models
            if role in (Role.REFERENCE, Role.TEACHER) and not (is_own and self.lora is not None):
                is_replaced = role is Role.REFERENCE and config.reference.update_every > 0
                shape = self.shape if is_own else ModelShape.of(models[role.value])
                frozen += shape.parameters * (MASTER if is_replaced else self.dtype_bytes) / self.shards
        memory = {"frozen models": frozen} if frozen else {}
        if self.settings.async_save and config.checkpoint.every:
            memory["checkpoint being written"] = self.saved_bytes()
        return memory

    def saved_bytes(self) -> float:
        """Return the bytes of one rank's part of a checkpoint."""
        saved, with_optimizer = 0.0, self.context.config.checkpoint.optimizer
        for table, learning in (("model", self.settings), ("critic", self.settings.critic)):
            states = self.states(table, learning)
            if states is not None:
                lora = self.lora if table == "model" else None
                adapter = 0.0 if lora is None else self.shape.adapter_parameters(lora.rank, lora.targets)
                saved += states["weights"] if lora is None else adapter * MASTER / self.shards
                saved += states["optimizer"] if with_optimizer else 0.0
        return saved

    def copied_bytes(self, shape: ModelShape, lora: LoRASettings | None) -> float:
        """Return the bytes of the weights that `ComputeCopies` copies: all, or only those of an adapter."""
        copied = shape.parameters if lora is None else shape.adapter_parameters(lora.rank, lora.targets)
        return float(copied * self.dtype_bytes)

    def gathered(self, shape: ModelShape) -> dict[str, float]:
        """Return the bytes of gathered or copied weights while a rank computes, without those in `state_bytes`."""
        if self.makes_copies:
            if self.keeps_copies or self.dtype_bytes == MASTER:
                return {}
            return {"weights in compute dtype": self.copied_bytes(shape, self.lora)}
        root = shape.embedding * (1 if shape.tied or self.role is Role.CRITIC else 2)
        return {"gathered weights": float((root + 2 * shape.layer_parameters) * self.dtype_bytes)}

    def gradients(self, shape: ModelShape) -> float:
        """Return the bytes of accumulated gradients, except those that `state_bytes` counts."""
        if self.keeps_copies and self.dtype_bytes < MASTER:
            return 0.0
        lora, learning = self.lora, self.settings.critic if self.role is Role.CRITIC else self.settings
        trained = count_trained_parameters(shape, learning.freeze)
        if lora is not None:
            trained = shape.adapter_parameters(lora.rank, lora.targets)
        return trained * MASTER / self.shards if not self.settings.cpu_offload else 0.0

    def forward_memory(self) -> dict[str, float]:
        """Return the additional memory while a microbatch is scored."""
        shape, tokens = self.shape, self.microbatch
        memory = {**self.gathered(shape), "activations": self.activations(shape).layer(tokens)}
        return memory | self.head(shape, tokens, trained=False)

    def backward_memory(self) -> dict[str, float]:
        """Return the additional memory at the peak of training."""
        shape, step = self.shape, self.tokens_per_step
        gradients, full = self.gradients(shape), self.microbatch
        # at the loss of the first microbatch there are no gradients yet; later ones add to all gradients
        rest = full if step >= 2 * full else max(0.0, step - full)
        at_first, at_later = self.estimate_loss_memory(full), self.estimate_loss_memory(rest)
        one_layer = self.activations(shape).layer(full)
        later = gradients + sum(at_later.values()) if rest else 0.0
        ends = gradients + one_layer
        if max(later, ends) > sum(at_first.values()):
            worst = {"gradients": gradients} | (at_later if later >= ends else {"activations": one_layer})
        else:
            worst = at_first
        return self.gathered(shape) | {name: size for name, size in worst.items() if size}

    def estimate_loss_memory(self, tokens: float) -> dict[str, float]:
        """Return the memory that a microbatch of ``tokens`` needs when its loss is computed."""
        shape = self.shape
        activations = self.activations(shape)
        kept = activations.layers(tokens)
        if self.settings.activation_checkpointing:
            kept = activations.boundaries(tokens, shape.layers)
            head = self.head(shape, tokens, trained=self.lora is None)
            one = activations.layer(tokens)
            return {"activations": kept} | (head if sum(head.values()) > one else {"one layer computed again": one})
        return {"activations": kept} | self.head(shape, tokens, trained=self.lora is None)

    def head(self, shape: ModelShape, tokens: float, *, trained: bool) -> dict[str, float]:
        """Return the bytes of the log-probability head; a value head has one column."""
        if self.role is Role.CRITIC:
            return {}
        chunk = self.settings.logprob_chunk
        return head_memory(
            shape,
            tokens,
            dtype_bytes=self.dtype_bytes,
            chunk=None if chunk == "auto" else chunk,
            trained=trained,
            on_gpu=self.context.on_gpu,
        )

    def training_seconds(self) -> float | None:
        """Return the seconds of all optimizer steps of a batch, for policy and critic."""
        if self.context.device is None:
            return None
        return sum(self.model_seconds(table) for table in ("model", "critic") if table in self.context.models)

    def model_seconds(self, table: str) -> float:
        """Return the seconds of all optimizer steps of one model."""
        device, load = self.context.device, self.context.load
        assert device is not None
        shape, settings = ModelShape.of(self.context.models[table]), self.settings
        lora = self.lora if table == "model" else None
        recomputed = 1.0 if settings.activation_checkpointing else 1 - self.activations(shape).budget
        passes = Passes.training(recomputed=recomputed, adapter=lora is not None)
        computed = self.seconds_of(shape, passes, exchanges=2 + recomputed)
        count = max(load.steps, -(-load.tokens // (self.ranks * self.microbatch)))
        sent = 0.0
        if self.ranks > 1:
            sent = count * self.communication_seconds(shape, device)
        if settings.cpu_offload:
            # for every microbatch: weights to the GPU twice, gradients back once
            sent += count * 3 * MASTER * shape.parameters / self.shards / ONLOAD_RATE
        learned = 1.0 if lora is None else lora.rank / shape.hidden
        steps = load.steps * optimizer_seconds(shape.parameters * learned / self.shards, device)
        steps *= device.bandwidth / HOST_BANDWIDTH if settings.cpu_offload else 1
        return max(computed, sent) + count * MICROBATCH_S + steps

    def communication_seconds(self, shape: ModelShape, device: Accelerator) -> float:
        """Return the seconds in which a microbatch gathers weights twice and sums gradients."""
        nodes = self.context.config.placement.nodes
        within = 1 if self.shards <= self.ranks // nodes else nodes
        seconds = shape.parameters * (2 * self.dtype_bytes + MASTER) / link_rate(device, within)
        if self.shards < self.ranks:
            seconds += 2 * MASTER * shape.parameters / self.shards / link_rate(device, nodes)
        return seconds

    def exchange_seconds(self, shape: ModelShape, device: Accelerator, *, passes: float) -> float:
        """Return the seconds in which context-parallel ranks exchange tokens for heads, ``passes`` times per layer."""
        size, nodes = self.settings.context_parallel, self.context.config.placement.nodes
        within = 1 if size <= self.ranks // nodes else nodes
        numbers = shape.layers * (shape.query + 2 * shape.keys + shape.value) * (1 - 1 / size)
        return passes * numbers * self.dtype_bytes * self.context.load.tokens / self.ranks / link_rate(device, within)

    def scoring(self) -> tuple[float | None, str]:
        """Return the seconds of the forward passes before training and a description; None if nothing is scored."""
        load, device = self.context.load, self.context.device
        roles = find_computed_roles(self.context.config, steps=load.steps)
        if not roles or device is None:
            return None, ""
        seconds = 0.0
        for role in roles:
            table = "model" if role is Role.POLICY else role.value
            shape = ModelShape.of(self.context.models.get(table, self.context.models["model"]))
            seconds += self.scoring_seconds(shape)
        return seconds, "forward passes of " + ", ".join(role.value for role in roles)

    def describe_microbatches(self) -> str:
        count = max(1, -(-int(self.tokens_per_step) // int(self.microbatch)))
        steps, size = self.context.load.steps, self.settings.context_parallel
        split = f", split over {size} ranks" if size > 1 else ""
        return f"{steps} x {count} microbatches of {int(self.microbatch * size):,} tokens at most{split}"

    def facts(self, static: Mapping[str, float]) -> dict[str, str]:
        """Return further facts for the plan."""
        shape, lora = self.shape, self.settings.lora
        trained = count_trained_parameters(shape, self.settings.freeze)
        if lora is not None:
            trained = shape.adapter_parameters(lora.rank, lora.targets)
        facts = {"trained parameters": f"{trained / 1e6:,.1f} M of {shape.parameters / 1e6:,.1f} M"}
        if self.settings.cpu_offload:
            facts["trainer in host memory"] = f"{sum(static.values()) / 2**30:.1f} GiB per rank"
        return facts


def count_trained_parameters(shape: ModelShape, frozen: tuple[str, ...]) -> float:
    """Return the number of weights that no pattern freezes."""
    return float(sum(w.size for w in shape.weights if not any(re.search(one, f"{w.name}.weight") for one in frozen)))


def _sum(parts: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, size in part.items():
            total[name] = total.get(name, 0.0) + size
    return total
