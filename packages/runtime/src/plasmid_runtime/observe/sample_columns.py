"""Columns of the sample store, and conversion of values that Parquet does not support."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from plasmid.types import SamplingParams
from plasmid.types.kept_sets import KeptSet
from plasmid.types.routing import Experts
from plasmid.types.top_tokens import TopTokens
from plasmid.utils.json_text import from_json

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
_EXPERTS = pa.struct({"bits": pa.int32(), "layers": pa.int32(), "choices": pa.int32(), "ids": pa.large_binary()})
_TOP = pa.struct({"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32())})
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
        ("experts", _EXPERTS),
        ("teacher_logprobs", pa.list_(pa.float32())),
        ("teacher_top", _TOP),
        ("sampling", _SAMPLING),
        ("sampling_options", pa.string()),
        ("token_rewards", pa.map_(pa.int32(), pa.float64())),
        ("is_baseline", pa.bool_()),
        ("timings", _NAMED_NUMBERS),
    ]
)
"""One row per sample; ``messages``, ``target``, ``sampling_options`` and the two ``metadata`` columns are JSON."""
ADDED = ("sampling_options", "token_rewards", "experts", "teacher_logprobs", "teacher_top", "is_baseline")
"""Columns that files of earlier versions lack; they are read as null."""


def make_list_column(arrays: Sequence[NDArray[Any]], type_: pa.DataType) -> pa.Array:
    """Create a list column from numpy arrays, without a Python object per element."""
    large = pa.types.is_large_list(type_)
    offsets = np.cumsum([0, *(len(a) for a in arrays)]).astype(np.int64 if large else np.int32)
    empty = np.zeros(0, type_.value_type.to_pandas_dtype())
    values = pa.array(np.concatenate([empty, *arrays]), type_.value_type)
    return (pa.LargeListArray if large else pa.ListArray).from_arrays(offsets, values, type=type_)


def make_kept_column(sets: Sequence[KeptSet | None]) -> pa.Array:
    """Create the ``kept`` column."""
    known = [KeptSet.whole(0) if kept is None else kept for kept in sets]
    fields = [make_list_column([getattr(kept, field.name) for kept in known], field.type) for field in _KEPT]
    return pa.StructArray.from_arrays(
        fields, fields=list(_KEPT), mask=pa.array([kept is None for kept in sets], pa.bool_())
    )


def read_kept_sets(column: pa.ChunkedArray) -> list[KeptSet | None]:
    """Read the output of `make_kept_column`. Raises ValueError if a field is missing."""
    array = column.combine_chunks()
    if array.null_count == len(array):
        return [None] * len(array)
    missing = [field.name for field in _KEPT if array.type.get_field_index(field.name) < 0]
    if missing:
        raise ValueError(f"column 'kept' has no field {missing[0]!r}")
    fields = {field.name: Lists(pa.chunked_array([array.field(field.name)])) for field in _KEPT}
    valid = array.is_valid().to_pylist()
    return [KeptSet(**{name: f[i] for name, f in fields.items()}) if valid[i] else None for i in range(len(array))]


def read_expert_rows(experts: Sequence[Experts | None]) -> list[dict[str, Any] | None]:
    """Return the values of the ``experts`` column."""
    return [
        None
        if e is None
        else {
            "bits": 8 * e.itemsize,
            "layers": e.shape[1],
            "choices": e.shape[2],
            "ids": np.ascontiguousarray(e).tobytes(),
        }
        for e in experts
    ]


def read_experts(row: Mapping[str, Any] | None, count: int) -> Experts | None:
    """Read a value of the ``experts`` column of ``count`` tokens. Raises ValueError if its size is wrong."""
    if row is None:
        return None
    dtype = {8: np.uint8, 16: np.uint16}[row["bits"]]
    return np.frombuffer(row["ids"], dtype).reshape(count, row["layers"], row["choices"]).copy()


def read_top_rows(tops: Sequence[TopTokens | None]) -> list[dict[str, Any] | None]:
    """Return the values of the ``teacher_top`` column, which are flat: K values for each loss token."""
    return [None if t is None else {"token_ids": t.token_ids.ravel(), "logprobs": t.logprobs.ravel()} for t in tops]


def read_top(row: Mapping[str, Any] | None, count: int) -> TopTokens | None:
    """Read a value of the ``teacher_top`` column of ``count`` loss tokens. Raises ValueError if its size is wrong."""
    if row is None:
        return None
    ids, logprobs = np.array(row["token_ids"], np.int32), np.array(row["logprobs"], np.float32)
    return TopTokens(token_ids=ids.reshape(count, -1), logprobs=logprobs.reshape(count, -1))


class Lists:
    """A list column as numpy arrays by row; each access returns a copy."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        array = column.combine_chunks()
        self._offsets = array.offsets.to_numpy()
        self._values = array.values.to_numpy(zero_copy_only=False)

    def __getitem__(self, row: int) -> NDArray[Any]:
        copied: NDArray[Any] = self._values[self._offsets[row] : self._offsets[row + 1]].copy()
        return copied


def make_sampling_row(sampling: SamplingParams) -> dict[str, Any]:
    """Return the settings for the ``sampling`` column; those of `SamplingParams.OPTIONAL` have a separate column."""
    row = {name: getattr(sampling, name) for name in _SAMPLING.names}
    return {**row, "top_k": None if sampling.top_k == "all" else sampling.top_k}


def read_sampling(row: Mapping[str, Any], options: str | None) -> SamplingParams:
    """Return the settings of a row of the columns ``sampling`` and ``sampling_options``."""
    top_k = "all" if row["top_k"] is None else row["top_k"]
    return SamplingParams.model_validate({**row, "top_k": top_k, **from_json(options or "{}")})
