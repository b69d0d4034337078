"""Overlap of communication between data-parallel ranks with computation.

Megatron divides gradients and parameters into buckets. With ``overlap_grad_reduce`` its backward hooks reduce a bucket
when the last microbatch of a step has computed its gradients. With ``overlap_param_gather`` the optimizer leaves the
updated parameters on the rank that owns them; `ParameterGather` completes them on the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from torch import nn

HEAD = ("decoder.final_layernorm", "output_layer", "score")
"""Modules of a chunk that run after its layers."""


def delay_grad_reduce(chunks: Sequence[DistributedDataParallel], config: Any, *, pipeline: bool) -> None:
    """Set the functions in Megatron's ``config`` of a model that its schedules call to reduce gradients.

    Gradients are reduced in the last microbatch of a step. With ``pipeline``, pipeline ranks except the first reduce
    them after their last backward pass, while the earlier ranks still compute, as in Megatron's own training loop.
    """
    no_sync, start = [chunk.no_sync for chunk in chunks], [chunk.start_grad_sync for chunk in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    if pipeline:
        config.grad_sync_func = start if len(chunks) > 1 else start[0]


class ParameterGather:
    """Gathers the updated parameters of a model, bucket by bucket, while its next forward pass computes.

    Replaces Megatron's forward hooks: these wait for the parameters of a module when it is called, but the weights of
    the output layer and of grouped experts are used without a call of their module, and modules of a compiled layer
    are called within its graph. So each layer waits for all of its parameters, outside of the graph.
    """

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._groups: list[Any] = []
        """Groups of buckets in the order in which the forward pass uses them first."""
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
            for module, parameters in _parts(chunk.module):
                own = (chunk.param_to_bucket_group.get(parameter) for parameter in parameters)
                groups = list(dict.fromkeys(group for group in own if group is not None))
                self._groups += [group for group in groups if group not in self._groups]
                module.register_forward_pre_hook(partial(self._before, groups))
        for group in self._groups:
            group.param_gather_dispatched = True  # complete until the first step

    def start(self) -> None:
        """Start gathering the first bucket. All ranks call it after a step of the optimizer."""
        self._start_from(0)

    def finish(self) -> None:
        """Complete all parameters, before they are read or written outside of a forward pass. All ranks call it."""
        for index in range(len(self._groups)):
            self._start_from(index)
        for group in self._groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)

    def _before(self, groups: Sequence[Any], module: nn.Module, inputs: Any) -> None:
        """Wait for the groups of a module, and start gathering the next one."""
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=True)
        if groups:
            self._start_from(self._groups.index(groups[-1]) + 1)

    def _start_from(self, index: int) -> None:
        for group in self._groups[index : index + 1]:
            if not group.param_gather_dispatched:
                group.start_param_sync()


def _parts(chunk: nn.Module) -> Iterator[tuple[nn.Module, Iterable[nn.Parameter]]]:
    """Yield the modules of a chunk that wait for parameters, in the order of the forward pass, and these parameters."""
    modules = dict(chunk.named_modules())
    parts = [modules[name] for name in ("embedding",) if name in modules]
    parts += [*modules["decoder"].layers]
    head = [modules[name] for name in HEAD if name in modules]
    known = {parameter for part in (*parts, *head) for parameter in part.parameters()}
    yield chunk, [parameter for parameter in chunk.parameters() if parameter not in known]
    for part in parts:
        yield part, list(part.parameters())
    if head:
        yield head[0], [parameter for part in head for parameter in part.parameters()]
