"""Forward and backward over the microbatches of a step, by Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from plasmid.types.batch import Rows
from plasmid_training.batches.collate import collate
from plasmid_training.batches.rank_batch import RankBatch, RankStep
from torch import Tensor, nn

from .packing import Packed, pack
from .settings import Megatron

Consume = Callable[[Packed, Any], Tensor]
"""Takes a microbatch and what the model says of it, on the last pipeline rank; returns the microbatch's loss."""


def microbatches(
    batch: RankBatch,
    rows: Rows,
    step: RankStep,
    settings: Megatron,
    *,
    device: torch.device,
    only_masked: bool = True,
) -> list[Packed]:
    """This rank's microbatches of one optimizer step, packed; filled up with empty ones where stages interleave."""
    parts = list(step.microbatches)
    if settings.virtual_pipeline > 1:
        parts += [()] * (-len(parts) % settings.pipeline_parallel)
    divisor = settings.tensor_parallel if settings.splits_sequences else 1
    collated = (collate(rows, indices, table_index=batch.samples, only_masked=only_masked) for indices in parts)
    on_device = settings.transformer_engine
    return [pack(one, device=device, divisor=divisor, bounds_on_device=on_device) for one in collated]


def run(chunks: Sequence[nn.Module], parts: Sequence[Packed], consume: Consume, *, train: bool, **options: Any) -> None:
    """Run the model, of which this rank has ``chunks``, over microbatches; ``options`` go to its forward.

    With ``train`` losses are differentiated and gradients summed over ranks, else ``consume`` returns whatever. All
    ranks of a replica call it together.
    """

    def forward(parts: Iterator[Packed], model: nn.Module) -> tuple[Any, Any]:
        packed = next(parts)
        return model(packed, **options), partial(loss, packed)

    def loss(packed: Packed, output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return consume(packed, output), torch.zeros((), dtype=torch.int, device=packed.input_ids.device), {}

    iterators = [iter(parts) for _ in chunks]
    assert get_model_config(chunks[0]).variable_seq_lengths, "microbatches differ in length"
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(parts),
        seq_length=1,  # ranks tell each other the length of every microbatch
        micro_batch_size=1,
        forward_only=not train,
    )
