"""The columns of the sample store, and how values that Parquet does not know become columns and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from plasmid.types import SamplingParams
from plasmid.types.kept_sets import KeptSet

_NAMED_NUMBERS = pa.map_(pa.string(), pa.float64())
_SPAN = pa.struct({"version": pa.int64(), "start": pa.int64(), "end": pa.int64()})
_SAMPLING = pa.struct(
    {
        "temperature": pa.float64(),
        "top_p": pa.float64(),
        "top_k": pa.int64(),  # null for "all"
        "min_p": pa.float64(),
        "max_new_tokens": pa.int64(),
        "stop": pa.list_(pa.string()),
        "stop_token_ids": pa.list_(pa.int64()),
    }
)
_KEPT = pa.struct(
    # 64 bits of offsets: the sets of a batch may have more than 2^31 tokens
    {"token_ids": pa.large_list(pa.int32()), "offsets": pa.list_(pa.int64()), "log_mass": pa.list_(pa.float32())}
)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("group_id", pa.int64()),
        ("sample_id", pa.string()),
        ("rollout_id", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("components", _NAMED_NUMBERS),
        ("reward_error", pa.string()),
        ("dropped_by", pa.string()),
        ("stop_reason", pa.string()),
        ("error", pa.string()),
        ("messages", pa.string()),
        ("target", pa.string()),
        ("prompt_metadata", pa.string()),
        ("source", pa.string()),
        ("profile", pa.string()),
        ("metadata", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(_SPAN)),
        ("kept", _KEPT),
        ("sampling", _SAMPLING),
        ("timings", _NAMED_NUMBERS),
    ]
)
"""One row per sample; ``messages``, ``target`` and the two ``metadata`` columns hold JSON."""


def lists(arrays: Sequence[NDArray[Any]], type_: pa.DataType) -> pa.Array:
    """A list column of numpy arrays, without a Python object per element."""
    large = pa.types.is_large_list(type_)
    offsets = np.cumsum([0, *(len(a) for a in arrays)]).astype(np.int64 if large else np.int32)
    empty = np.zeros(0, type_.value_type.to_pandas_dtype())
    values = pa.array(np.concatenate([empty, *arrays]), type_.value_type)
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values, type=type_)


def kept_column(sets: Sequence[KeptSet | None]) -> pa.Array:
    """The ``kept`` column."""
    known = [KeptSet.whole(0) if kept is None else kept for kept in sets]
    fields = [lists([getattr(kept, field.name) for kept in known], field.type) for field in _KEPT]
    return pa.StructArray.from_arrays(
        fields, fields=list(_KEPT), mask=pa.array([kept is None for kept in sets], pa.bool_())
    )


def kept_sets(column: pa.ChunkedArray) -> list[KeptSet | None]:
    """What `kept_column` was given. Raises ValueError for sets without their mass."""
    array = column.combine_chunks()
    if array.null_count == len(array):
        return [None] * len(array)
    missing = [field.name for field in _KEPT if array.type.get_field_index(field.name) < 0]
    if missing:
        raise ValueError(f"column 'kept' has no field {missing[0]!r}")
    fields = {field.name: Lists(pa.chunked_array([array.field(field.name)])) for field in _KEPT}
    valid = array.is_valid().to_pylist()
    return [KeptSet(**{name: f[i] for name, f in fields.items()}) if valid[i] else None for i in range(len(array))]


class Lists:
    """A list column as numpy arrays by row; each is a copy of its own."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        self._offsets = array.offsets.to_numpy()
        self._values = array.values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> NDArray[Any]:
        copied: NDArray[Any] = self._values[self._offsets[row] : self._offsets[row + 1]].copy()
        return copied


def sampling_row(sampling: SamplingParams) -> dict[str, Any]:
    """The settings as the ``sampling`` column holds them."""
    return {**sampling.model_dump(), "top_k": None if sampling.top_k == "all" else sampling.top_k}
