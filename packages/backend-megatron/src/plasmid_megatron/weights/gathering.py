"""Gather the whole model from all ranks, as a stream of tensors with Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
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


Change = Callable[[Tensor], Tensor]
NONE: Mapping[str, Change] = {}


def model_weights(chunks: Sequence[nn.Module], architecture: Architecture) -> list[Weight]:
    """Return this rank's weights of the model, each once in all pipeline ranks."""
    last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    first = mpu.is_pipeline_first_stage(ignore_virtual=True)
    # with several pipeline ranks, the last one has a copy of the tied embedding as its output layer
    has_copy = architecture.tied and last and not first
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

        ``changes`` are functions, by `Weight.name`, that are applied to this rank's part of a weight before the cast.
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
        tensor = weight.tensor.detach()
        if weight.name in changes:
            tensor = changes[weight.name](tensor)
        tensor = (tensor.to(dtype) if _is_cast(weight) else tensor).contiguous()
        parts = _gather(tensor, tensor_group(weight)) if is_split(weight) else [tensor]
        whole = join(weight.name, parts, weight)
        experts = [whole] if weight.expert is None else _gather(whole, mpu.get_expert_model_parallel_group())
        per_rank = experts_per_rank(self.architecture)
        for rank, one in enumerate(experts):
            yield from self._convert(weight.full_name(rank, per_rank), one)

    def _outline(self, weight: Weight) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield the name, shape and dtype of each gathered tensor, without communication."""
        ranks = tensor_group(weight).size() if is_split(weight) else 1
        empty = torch.empty_like(weight.tensor, device="meta")
        whole = join(weight.name, [empty] * ranks, weight)
        experts = 1 if weight.expert is None else mpu.get_expert_model_parallel_world_size()
        for rank in range(experts):
            for name, tensor in self._convert(weight.full_name(rank, experts_per_rank(self.architecture)), whole):
                yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _is_cast(weight: Weight) -> bool:
    """Return False for expert biases, which models and engines keep in float32 for every dtype of the folder."""
    return not weight.name.endswith("expert_bias")
