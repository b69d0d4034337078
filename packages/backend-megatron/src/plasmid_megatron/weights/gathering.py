"""Gather the whole model from all ranks, as a stream of tensors with Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from plasmid_models.sync import Gatherable, Round
from torch import Tensor, nn

from .bridge import Architecture
from .shards import Weight, experts_per_rank, is_split, join, tensor_group, to_hf, weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Names, shapes and dtypes of the Hugging Face tensors that one weight of a pipeline rank is converted to."""

    stage: int
    """Pipeline rank that has the weight."""
    is_cast: bool
    """Whether the tensors are cast to the requested dtype; otherwise they keep their own."""
    tensors: tuple[tuple[str, tuple[int, ...], str], ...]
    """Name, shape and own dtype of each."""

    def dtype(self, own: str, requested: torch.dtype) -> torch.dtype:
        """Return the dtype of a gathered tensor: ``requested`` if it is cast, else its own."""
        own_dtype: torch.dtype = getattr(torch, own)
        return requested if self.is_cast else own_dtype


@dataclass(slots=True)
class _Weight:
    """One whole weight of the model, which some ranks hold."""

    is_cast: bool
    tensors: list[tuple[str, tuple[int, ...], str]]
    """As in `Outline`."""
    cells: set[tuple[int, ...]] = field(default_factory=set)
    """Groups of ranks that each hold the whole weight together."""

    def dtype(self, own: str, requested: torch.dtype) -> torch.dtype:
        """Return the dtype of a gathered tensor."""
        own_dtype: torch.dtype = getattr(torch, own)
        return requested if self.is_cast else own_dtype


Change = Callable[[Tensor], Tensor]
NONE: Mapping[str, Change] = {}


def model_weights(chunks: Sequence[nn.Module], architecture: Architecture) -> list[Weight]:
    """Return this rank's weights of the model, each once in all pipeline ranks."""
    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    first = mpu.is_pipeline_first_stage(ignore_virtual=True)
    # with several pipeline ranks, the last one has a copy of the tied embedding as its output layer
    has_copy = architecture.is_tied and last and not first
    return [w for w in weights(chunks) if not (has_copy and w.name == "output_layer.weight")]


class Gatherer:
    """Gathers weights of one model, any number of times. All ranks must create it and call `tensors` together."""

    def __init__(
        self,
        own: Sequence[Weight],
        architecture: Architecture,
        *,
        convert: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """``own`` are the weights of this rank. ``convert`` yields the Hugging Face tensors of a whole one, by name."""
        self.architecture = architecture
        self._convert = convert or partial(to_hf, architecture)
        self._weights = own
        self._stage = mpu.get_pipeline_model_parallel_rank()
        outlines = [
            Outline(stage=self._stage, is_cast=_is_cast(weight), tensors=tuple(self._outline(weight)))
            for weight in self._weights
        ]
        stages: list[list[Outline]] = [[]] * mpu.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(stages, outlines, group=mpu.get_pipeline_model_parallel_group())
        self._outlines = [outline for stage in stages for outline in stage]
        per_rank = experts_per_rank(architecture)

        self._names = [weight.full_name(mpu.get_expert_model_parallel_rank(), per_rank) for weight in own]
        self._cells = self._find_cells()

    def _find_cells(self) -> dict[str, _Weight]:
        """Return what every rank has of each whole weight, in the order of the pipeline ranks."""
        own = [
            (self._stage, name, _ranks_of(weight), _is_cast(weight), list(self._convert_empty(weight, name)))
            for name, weight in zip(self._names, self._weights, strict=True)
        ]
        every: list[list[Any]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, own)
        found: dict[str, _Weight] = {}
        for _, name, ranks, is_cast, tensors in sorted((one for own in every for one in own), key=lambda o: o[0]):
            entry = found.setdefault(name, _Weight(is_cast=is_cast, tensors=tensors))
            entry.cells.add(ranks)
        return found

    def gatherables(self, dtype: torch.dtype) -> list[Gatherable]:
        """Return all weights in Megatron's layout. A weight can be gathered by the ranks that hold it or a part of
        it."""
        return [
            Gatherable(
                key=name,
                num_bytes=sum(math.prod(shape) * weight.dtype(own, dtype).itemsize for _, shape, own in weight.tensors),
                ranks=tuple(sorted(chain.from_iterable(weight.cells))),
            )
            for name, weight in self._cells.items()
        ]

    @torch.no_grad()
    def shares(
        self,
        rounds: Sequence[Round],
        *,
        dtype: torch.dtype,
        device: torch.device,
        changes: Mapping[str, Change] = NONE,
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield, in every round, the tensors of the weights that this rank sends.

        Only the tensor-parallel group of the sending rank gathers a weight, on that rank.
        """
        own = dict(zip(self._names, self._weights, strict=True))
        for owners in rounds:
            tensors: list[tuple[str, Tensor]] = []
            for name, owner in owners.items():
                if name in own and owner in _ranks_of(own[name]):
                    tensors += self._gather_on(owner, name, own[name], dtype, changes)
            yield [(name, tensor.to(device)) for name, tensor in tensors]

    def _gather_on(
        self, owner: int, name: str, weight: Weight, dtype: torch.dtype, changes: Mapping[str, Change]
    ) -> Iterable[tuple[str, Tensor]]:
        """Return the Hugging Face tensors of a weight on the rank ``owner``; none on other ranks."""
        tensor, parts = self._part(weight, dtype, changes), list[Tensor]()
        is_owner = dist.get_rank() == owner
        if not is_split(weight):
            parts = [tensor]
        else:
            group = tensor_group(weight)
            parts = [torch.empty_like(tensor) for _ in range(group.size())] if is_owner else []
            dist.gather(tensor, parts if is_owner else None, dst=owner, group=group)
        return self._convert(name, join(weight.name, parts, weight)) if is_owner else ()

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the size of every tensor in bytes, in the order of `tensors`, if the weights are cast to ``dtype``."""
        return {
            name: math.prod(shape) * outline.dtype(own, dtype).itemsize
            for outline in self._outlines
            for name, shape, own in outline.tensors
        }

    @torch.no_grad()
    def tensors(
        self, *, dtype: torch.dtype, device: torch.device, changes: Mapping[str, Change] = NONE
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors unsharded, on every rank. Weights are cast before gathering, to send fewer bytes.

        ``changes`` are functions, by `Weight.full_name`, that are applied to this rank's part of a weight before the
        cast.
        """
        own = iter(self._weights)
        for outline in self._outlines:
            if outline.stage == self._stage:
                gathered = list(self._whole(next(own), dtype, changes))
            else:
                gathered = [
                    (name, torch.empty(shape, dtype=outline.dtype(own_dtype, dtype)))
                    for name, shape, own_dtype in outline.tensors
                ]
            yield from self._from_stage(outline.stage, gathered, device)

    def _from_stage(
        self, stage: int, gathered: list[tuple[str, Tensor]], device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        group = mpu.get_pipeline_model_parallel_group()
        for name, tensor in gathered:
            if group.size() > 1:
                tensor = tensor.to(torch.cuda.current_device())
                dist.broadcast(tensor, src=dist.get_global_rank(group, stage), group=group)
            yield name, tensor.to(device)

    def _whole(self, weight: Weight, dtype: torch.dtype, changes: Mapping[str, Change]) -> Iterator[tuple[str, Tensor]]:
        tensor = self._part(weight, dtype, changes)
        parts = _gather(tensor, tensor_group(weight)) if is_split(weight) else [tensor]
        whole = join(weight.name, parts, weight)
        experts = [whole] if weight.expert is None else _gather(whole, mpu.get_expert_model_parallel_group())
        per_rank = experts_per_rank(self.architecture)
        for rank, one in enumerate(experts):
            yield from self._convert(weight.full_name(rank, per_rank), one)

    def _part(self, weight: Weight, dtype: torch.dtype, changes: Mapping[str, Change]) -> Tensor:
        """Return this rank's part of a weight, changed and cast."""
        tensor = weight.tensor.detach()
        name = weight.full_name(mpu.get_expert_model_parallel_rank(), experts_per_rank(self.architecture))
        if name in changes:
            tensor = changes[name](tensor)
        return (tensor.to(dtype) if _is_cast(weight) else tensor).contiguous()

    def _outline(self, weight: Weight) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield the name, shape and dtype of each gathered tensor, without communication."""
        experts = 1 if weight.expert is None else mpu.get_expert_model_parallel_world_size()
        for rank in range(experts):
            yield from self._convert_empty(weight, weight.full_name(rank, experts_per_rank(self.architecture)))

    def _convert_empty(self, weight: Weight, full_name: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield the name, shape and dtype of each Hugging Face tensor of one whole weight."""
        ranks = tensor_group(weight).size() if is_split(weight) else 1
        whole = join(weight.name, [torch.empty_like(weight.tensor, device="meta")] * ranks, weight)
        for name, tensor in self._convert(full_name, whole):
            yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _ranks_of(weight: Weight) -> tuple[int, ...]:
    """Return the ranks that hold the whole weight together with this rank."""
    return tuple(dist.get_process_group_ranks(tensor_group(weight))) if is_split(weight) else (dist.get_rank(),)


def _is_cast(weight: Weight) -> bool:
    """Return False for expert biases, which models and engines keep in float32 for every dtype of the folder."""
    return not weight.name.endswith("expert_bias")
