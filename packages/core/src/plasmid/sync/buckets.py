"""Weights as a stream of flat buckets, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ..protocols import Bucket
from .checksum import as_bytes, checksum

ALIGNMENT = 16
"""Every tensor starts at a multiple of this many bytes, so that a receiver can view it in place."""


def make_buckets(named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Fill buckets in order; a tensor larger than ``bucket_bytes`` travels alone.

    Reads the stream one bucket ahead at most, so that a model may be gathered tensor by tensor.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    pending: list[tuple[str, Tensor]] = []
    index = size = 0
    for name, tensor in named_tensors:
        if pending and size + _padded(tensor.nbytes) > bucket_bytes:
            yield _bucket(index, pending, size)
            index, size = index + 1, 0
        pending.append((name, tensor))
        size += _padded(tensor.nbytes)
    if pending:
        yield _bucket(index, pending, size, is_last=True)


def unpack(bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
    """The bucket's tensors, as views of its data."""
    start = 0
    for name, shape, dtype_name in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield name, bucket.data[start : start + num_bytes].view(dtype).view(shape)
        start += _padded(num_bytes)


def _bucket(index: int, pending: list[tuple[str, Tensor]], size: int, *, is_last: bool = False) -> Bucket:
    """Empties ``pending`` while it copies, so that gathered tensors and their copies do not pile up."""
    names = tuple(name for name, _ in pending)
    shapes = tuple(tuple(tensor.shape) for _, tensor in pending)
    dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in pending)
    data = torch.empty(size, dtype=torch.uint8, device=pending[0][1].device)
    places = torch.split_with_sizes(data, [_padded(tensor.nbytes) for _, tensor in pending])
    pending.reverse()
    for place in places:
        content = as_bytes(pending.pop()[1])
        if content.numel() < place.numel():
            place, rest = place.tensor_split((content.numel(),))
            rest.zero_()
        place.copy_(content)
    return Bucket(
        index=index,
        names=names,
        shapes=shapes,
        dtypes=dtypes,
        data=data,
        checksum=checksum(data),
        is_last=is_last,
    )


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
