"""Whole samples on disk: one Parquet file per batch, one row per sample, read back bit by bit.

Replays and checkpoints are made of these files, and any Parquet reader can open them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from plasmid.errors import CheckpointError
from plasmid.types import Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid.utils.json_text import from_json, to_json
from plasmid.utils.safe_files import replacing

from .sample_columns import SCHEMA, Lists, kept_column, kept_sets, lists, sampling_row


def write_samples(
    path: Path, groups: Sequence[PromptGroup], *, step: int, dropped_by: Mapping[int, str] | None = None
) -> None:
    """Write the groups in their order; the file is complete or absent afterwards. Raises `CheckpointError`.

    ``dropped_by`` is the kind of filter by group id. Metadata, targets and messages are kept as JSON, so values that
    JSON does not know come back as lists or strings. A group without samples leaves no trace.
    """
    table = _table(groups, step, dropped_by or {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True) as file:
            pq.write_table(table, file, compression="zstd")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write samples: {_reason(error)}") from error


def read_samples(path: Path) -> list[PromptGroup]:
    """The groups that `write_samples` was given. Raises `CheckpointError`."""
    table = read_table(path)
    try:
        rows = zip(_samples(table, kept_sets(table.column("kept"))), _prompts(table), strict=True)
        return [
            PromptGroup(id=group_id, prompt=(members := list(found))[0][1], samples=tuple(s for s, _ in members))
            for group_id, found in groupby(rows, key=lambda row: row[0].group_id)
        ]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, pa.ArrowException) as error:
        raise CheckpointError(f"{path}: not a file of samples: {_first_line(error)}") from None


def read_dropped(path: Path) -> dict[int, str]:
    """Which groups of the file a filter dropped: its kind by group id."""
    table = read_table(path, columns=("group_id", "dropped_by"))
    ids, kinds = (table.column(name).to_pylist() for name in ("group_id", "dropped_by"))
    return {id_: kind for id_, kind in zip(ids, kinds, strict=True) if kind}


def read_table(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """The file as an Arrow table with the columns of `SCHEMA`, all of them or these. Raises `CheckpointError`."""
    try:
        found = pq.read_schema(path)
        missing = [name for name in SCHEMA.names if name not in found.names]
        if missing:
            raise CheckpointError(f"{path}: not a file of samples: it has no column {missing[0]!r}")
        return pq.read_table(path, columns=list(columns) if columns else SCHEMA.names)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read samples: {_reason(error)}") from error
    except pa.ArrowException as error:
        raise CheckpointError(f"{path}: not a file of samples: {str(error).splitlines()[0]}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reason(error: OSError) -> str:
    return (
        os.strerror(error.errno).lower() if error.errno else str(error).splitlines()[0]
    )  # Arrow's texts name the path


def _table(groups: Sequence[PromptGroup], step: int, dropped_by: Mapping[int, str]) -> pa.Table:
    ids = [group.id for group in groups]
    if len(set(ids)) != len(ids):
        raise ValueError("groups must have distinct ids")
    pairs = [(group.prompt, sample) for group in groups for sample in group.samples]
    for group in groups:
        for s in group.samples:
            if (s.group_id, s.prompt_id) != (group.id, group.prompt.id):
                raise ValueError(f"sample {s.id}: is not of group {group.id} and prompt {group.prompt.id}")
    columns: dict[str, Any] = {
        "step": [step] * len(pairs),
        "dropped_by": [dropped_by.get(sample.group_id, "") for _, sample in pairs],
        **_prompt_columns([prompt for prompt, _ in pairs]),
        **_sample_columns([sample for _, sample in pairs]),
    }
    return pa.table([pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)


def _prompt_columns(prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "prompt": [p.text for p in prompts],
        "prompt_token_ids": lists([p.token_ids for p in prompts], SCHEMA.field("prompt_token_ids").type),
        "messages": [to_json(p.messages) for p in prompts],
        "target": [to_json(p.target) for p in prompts],
        "prompt_metadata": [to_json(p.metadata) for p in prompts],
        "source": [p.source for p in prompts],
        "profile": [p.profile for p in prompts],
    }


def _sample_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    scores = [s.score for s in samples]
    return {
        "sample_id": [s.id for s in samples],
        "rollout_id": [s.rollout_id for s in samples],
        "group_id": [s.group_id for s in samples],
        "prompt_id": [s.prompt_id for s in samples],
        "text": [s.text for s in samples],
        "token_ids": lists([s.token_ids for s in samples], SCHEMA.field("token_ids").type),
        "loss_mask": lists([s.loss_mask for s in samples], SCHEMA.field("loss_mask").type),
        "rollout_logprobs": lists([s.rollout_logprobs for s in samples], SCHEMA.field("rollout_logprobs").type),
        "versions": [[{"version": v.version, "start": v.start, "end": v.end} for v in s.versions] for s in samples],
        "sampling": [sampling_row(s.sampling) for s in samples],
        "stop_reason": [s.stop_reason.value for s in samples],
        "error": [s.error for s in samples],
        "reward": [score and score.value for score in scores],
        "components": [list(score.components.items()) if score else None for score in scores],
        "reward_error": [score.error if score else None for score in scores],
        "kept": kept_column([s.kept for s in samples]),
        "metadata": [to_json(s.metadata) for s in samples],
        "timings": [list(s.timings.items()) for s in samples],
    }


def _prompts(table: pa.Table) -> Iterator[Prompt]:
    tokens = Lists(table.column("prompt_token_ids"))
    names = ("group_id", "prompt_id", "prompt", "messages", "target", "prompt_metadata", "source", "profile")
    last: tuple[int, Prompt] | None = None
    for i, row in enumerate(_rows(table, names)):
        if last is None or last[0] != row["group_id"]:  # all samples of a group share one prompt object
            prompt = Prompt(
                id=row["prompt_id"],
                token_ids=tokens[i],
                text=row["prompt"],
                messages=tuple(from_json(row["messages"])),
                target=from_json(row["target"]),
                metadata=from_json(row["prompt_metadata"]),
                source=row["source"],
                profile=row["profile"],
            )
            last = (row["group_id"], prompt)
        yield last[1]


def _samples(table: pa.Table, kept: Sequence[KeptSet | None]) -> Iterator[Sample]:
    arrays = {name: Lists(table.column(name)) for name in ("token_ids", "loss_mask", "rollout_logprobs")}
    plain = [name for name in SCHEMA.names if name not in {*arrays, "kept", "prompt_token_ids"}]
    known: dict[str, SamplingParams] = {}
    for i, row in enumerate(_rows(table, plain)):
        yield Sample(
            id=row["sample_id"],
            rollout_id=row["rollout_id"],
            group_id=row["group_id"],
            prompt_id=row["prompt_id"],
            **{name: array[i] for name, array in arrays.items()},
            versions=tuple(VersionSpan(**span) for span in row["versions"]),
            sampling=_sampling(row["sampling"], known),
            text=row["text"],
            stop_reason=StopReason(row["stop_reason"]),
            error=row["error"],
            kept=kept[i],
            score=_score(row),
            metadata=from_json(row["metadata"]),
            timings=dict(row["timings"]),
        )


def _rows(table: pa.Table, names: Iterable[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.select(list(names)).to_pylist()
    return rows


def _score(row: Mapping[str, Any]) -> Score | None:
    if row["reward"] is None:
        return None
    return Score(value=row["reward"], components=dict(row["components"]), error=row["reward_error"])


def _sampling(row: Mapping[str, Any], known: dict[str, SamplingParams]) -> SamplingParams:
    key = to_json(row)
    if key not in known:
        top_k = "all" if row["top_k"] is None else row["top_k"]
        known[key] = SamplingParams.model_validate({**row, "top_k": top_k})
    return known[key]
