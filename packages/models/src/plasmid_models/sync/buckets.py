"""Packing of weights into flat buckets, and unpacking."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from plasmid.protocols import Bucket
from torch import Tensor

from .checksum import checksum

Shape = tuple[int, ...]
ALIGNMENT = 16
"""Alignment of tensors in a bucket, in bytes, so that a receiver can view them in place."""


def make_buckets(named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Pack tensors into buckets in order; a tensor larger than ``bucket_bytes`` gets its own bucket.

    Reads the stream at most one bucket ahead, so that a model can be gathered tensor by tensor.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    pending: list[tuple[str, Tensor]] = []
    index = size = 0
    for name, tensor in named_tensors:
        if pending and size + _round_up(tensor.nbytes) > bucket_bytes:
            yield make_bucket(index, pending)
            index, size = index + 1, 0
        pending.append((name, tensor))
        size += _round_up(tensor.nbytes)
    if pending:
        yield make_bucket(index, pending, is_last=True)


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """Return the bucket's tensors by name, as views of its data."""
    dtypes = [getattr(torch, name) for name in bucket.dtypes]
    return zip(bucket.names, _views(bucket.data, bucket.shapes, dtypes), strict=True)


def _views(data: Tensor, shapes: Sequence[Shape], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return views of consecutive tensors in the bytes, each aligned to `ALIGNMENT`."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    places = torch.split_with_sizes(data, [_round_up(size) for size in sizes])
    return [
        (place[:size] if size < place.numel() else place).view(dtype).view(shape)
        for place, size, shape, dtype in zip(places, sizes, shapes, dtypes, strict=True)
    ]


def make_bucket(index: int, pending: list[tuple[str, Tensor]], *, is_last: bool = False) -> Bucket:
    """Make a bucket and empty ``pending``, so that gathered tensors are freed after they are copied."""
    size = sum(_round_up(tensor.nbytes) for _, tensor in pending)
    names = tuple(name for name, _ in pending)
    contents = [tensor.detach() for _, tensor in pending]
    pending.clear()
    shapes = tuple(tuple(tensor.shape) for tensor in contents)
    dtypes = [tensor.dtype for tensor in contents]
    # padding must be zeros, because the checksum covers it
    make = torch.empty if all(tensor.nbytes % ALIGNMENT == 0 for tensor in contents) else torch.zeros
    data = make(size, dtype=torch.uint8, device=contents[0].device)
    torch._foreach_copy_(_views(data, shapes, dtypes), contents)  # one launch instead of one per tensor
    del contents
    return Bucket(
        index=index,
        names=names,
        shapes=shapes,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in dtypes),
        data=data,
        checksum=checksum(data),
        is_last=is_last,
    )


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
