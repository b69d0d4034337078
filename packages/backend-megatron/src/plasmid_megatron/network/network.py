"""This rank's part of one model, run by Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import tee
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from plasmid_models.source import Source
from plasmid_models.sync import Gatherable, Round
from plasmid_training.batches.collate import Microbatch
from plasmid_training.learning_settings import LearningSettings
from plasmid_training.offload import OffloadedMemory
from plasmid_training.rank.backend import Consume
from torch import Tensor, nn

from ..lora.adapter import ParallelAdapter
from ..model.experts import RoutingReplay
from ..model.packing import Packed, pack
from ..optimizer import MegatronOptimizer, wrap
from ..settings import Megatron
from ..weights.bridge import Architecture
from ..weights.gathering import Gatherer, model_weights
from ..weights.shards import load_weights, weights


class Network:
    """One module, or several with interleaved pipelines. Implements `plasmid_training.rank.backend.RankModel`."""

    fuses_loss = True
    optimizer: MegatronOptimizer
    """Set for trained models."""

    def __init__(
        self,
        bare: list[nn.Module],
        architecture: Architecture,
        settings: Megatron,
        learning: LearningSettings,
        *,
        adapter: ParallelAdapter | None = None,
    ) -> None:
        self.bare, self.architecture, self.learning, self.adapter = bare, architecture, learning, adapter
        self._settings = settings
        self._chunks: Sequence[nn.Module] = bare
        self._replays: dict[int, RoutingReplay] = {}

    def make_optimizer(self) -> MegatronOptimizer:
        chunks = self._chunks = wrap(self.bare, self._settings)
        self.optimizer = MegatronOptimizer(self._settings, self.learning, chunks)
        if self.adapter is not None:
            self.adapter.before_access = self.optimizer.finish_gathering
        return self.optimizer

    def finish_gathering(self) -> None:
        """Complete the parameters, before they are read or written outside of a forward pass. All ranks call it."""
        if hasattr(self, "optimizer"):
            self.optimizer.finish_gathering()

    def run(self, microbatches: Iterable[Microbatch], consume: Consume, *, train: bool, **options: Any) -> None:
        def forward(parts: Iterator[Packed], model: nn.Module) -> tuple[Any, Any]:
            packed = next(parts)
            if self._settings.routing_replay:
                self._replay(model).set(packed.experts)
            return model(packed, **options), partial(loss, packed)

        def loss(packed: Packed, output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
            no_tokens = torch.zeros((), dtype=torch.int, device=packed.input_ids.device)
            return consume(packed.batch, output), no_tokens, {}

        batches = list(microbatches)
        iterators = list(tee(map(self._pack, batches), len(self._chunks)))  # Megatron asks for a list
        assert get_model_config(self._chunks[0]).variable_seq_lengths, "microbatches differ in length"
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(self._chunks),
            num_microbatches=len(batches),
            seq_length=1,  # ranks exchange the length of every microbatch
            micro_batch_size=1,
            forward_only=not train,
        )

    def shards(self) -> Sequence[Tensor]:
        self.finish_gathering()
        return [weight.tensor for weight in weights(self.bare)]

    def load(self, source: Source) -> None:
        self.finish_gathering()
        load_weights(self.bare, self.architecture, source.path, where=source.where)

    def weights(self, *, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        self.finish_gathering()
        return self._gatherer.tensors(dtype=dtype, device=device, changes=self._changes())

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        return self._gatherer.gatherables(dtype)

    def shares(
        self, rounds: Sequence[Round], *, dtype: torch.dtype, device: torch.device
    ) -> Iterator[list[tuple[str, Tensor]]]:
        self.finish_gathering()
        return self._gatherer.shares(rounds, dtype=dtype, device=device, changes=self._changes())

    def _changes(self) -> Mapping[str, Callable[[Tensor], Tensor]]:
        return {} if self.adapter is None else self.adapter.merge()

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        return self._gatherer.sizes(dtype)

    def offload(self, memory: OffloadedMemory) -> None:
        self.finish_gathering()
        memory.move_out(tensor for chunk in self.bare for tensor in (*chunk.parameters(), *chunk.buffers()))
        if hasattr(self, "optimizer"):
            memory.move_out(self.optimizer.state())
            memory.move_out(self.optimizer.gradients(), keep=False)

    def _replay(self, chunk: nn.Module) -> RoutingReplay:
        if id(chunk) not in self._replays:
            self._replays[id(chunk)] = RoutingReplay(chunk)
        return self._replays[id(chunk)]

    @cached_property
    def _gatherer(self) -> Gatherer:
        return Gatherer(model_weights(self.bare, self.architecture), self.architecture)

    def _pack(self, microbatch: Microbatch) -> Packed:
        settings, device = self._settings, next(self.bare[0].parameters()).device
        engine = settings.transformer_engine
        return pack(
            microbatch,
            device=device,
            dtype=self.architecture.config.params_dtype,
            divisor=settings.tensor_parallel if settings.splits_sequences else 1,
            bounds_on_device=engine,
            # losses of experts would count the padding
            dense=not engine and self.architecture.config.num_moe_experts is None,
            linear=self.architecture.config.linear_attention_freq is not None,
        )
