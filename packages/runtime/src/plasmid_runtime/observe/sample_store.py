"""Sample store: one Parquet file per batch, one row per sample, restored bit for bit.

Replays and checkpoints use these files, and any Parquet reader can open them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from plasmid.errors import CheckpointError
from plasmid.types import Floats, Prompt, PromptGroup, Sample, SamplingParams, Score, StopReason, VersionSpan
from plasmid.types.kept_sets import KeptSet
from plasmid.utils.json_text import from_json, to_json
from plasmid.utils.safe_files import check_readable, replace_file

from .sample_columns import (
    ADDED,
    SCHEMA,
    Lists,
    make_kept_column,
    make_list_column,
    make_sampling_row,
    read_expert_rows,
    read_experts,
    read_kept_sets,
    read_sampling,
    read_top,
    read_top_rows,
)

UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    pa.ArrowException,
)
"""Errors raised when reading a damaged file."""


def write_samples(
    path: Path, groups: Sequence[PromptGroup], *, step: int, dropped_by: Mapping[int, str] | None = None
) -> None:
    """Write groups in order, atomically. Raises `CheckpointError`.

    ``dropped_by`` has the kind of filter by group id. Metadata, targets and messages are stored as JSON, so values that
    JSON does not support are read as lists or strings. Groups without samples are not stored.
    """
    table = _table(groups, step, dropped_by or {})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, durable=True) as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write samples: {_reason(error)}") from error


def read_samples(path: Path) -> list[PromptGroup]:
    """Read the groups of a file of `write_samples`. Raises `CheckpointError`."""
    table = read_table(path)
    try:
        rows = zip(_samples(table, read_kept_sets(table.column("kept"))), _prompts(table), strict=True)
        return [
            PromptGroup(id=group_id, prompt=(members := list(found))[0][1], samples=tuple(s for s, _ in members))
            for group_id, found in groupby(rows, key=lambda row: row[0].group_id)
        ]
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a file of samples: {_first_line(error)}") from None


def sample_files(folder: Path) -> list[Path]:
    """Return the sample files of a run, by set and then by step: numbers have more than six digits after 999,999."""

    def place(file: Path) -> tuple[str, int, str]:
        name, _, number = file.stem.rpartition("-")
        return name, int(number) if number.isdecimal() else -1, number

    return sorted(folder.glob("*.parquet"), key=place)


def numbered_files(folder: Path, prefix: str) -> dict[int, Path]:
    """Return the sample files whose names are ``prefix`` and a number, by that number, in order."""
    found = {file.stem.removeprefix(prefix): file for file in sample_files(folder) if file.stem.startswith(prefix)}
    return {int(number): file for number, file in found.items() if number.isdecimal()}


def read_dropped(path: Path) -> dict[int, str]:
    """Read the groups that filters dropped, as kinds of filters by group id."""
    table = read_table(path, columns=("group_id", "dropped_by"))
    ids, kinds = (table.column(name).to_pylist() for name in ("group_id", "dropped_by"))
    return {id_: kind for id_, kind in zip(ids, kinds, strict=True) if kind}


def read_table(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Read the file as an Arrow table with all ``columns``, by default those of `SCHEMA`. Raises `CheckpointError`."""
    try:
        check_readable(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            found = file.schema_arrow
            missing = [name for name in SCHEMA.names if name not in found.names]
            if lost := [name for name in missing if name not in ADDED]:
                raise CheckpointError(f"{path}: not a file of samples: it has no column {lost[0]!r}")
            for name in set(SCHEMA.names).difference(missing):
                if name != "kept" and found.field(name).type != SCHEMA.field(name).type:  # see `read_kept_sets`
                    raise CheckpointError(f"{path}: not a file of samples: column {name!r} is {found.field(name).type}")
            table = file.read([name for name in columns or SCHEMA.names if name not in missing])
        for name in missing if columns is None else ():
            table = table.append_column(SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
        return table
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read samples: {_reason(error)}") from error
    except UNREADABLE as error:
        raise CheckpointError(f"{path}: not a file of samples: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _reason(error: OSError) -> str:
    return (
        os.strerror(error.errno).lower() if error.errno else str(error).splitlines()[0]
    )  # Arrow's messages contain the path


def _table(groups: Sequence[PromptGroup], step: int, dropped_by: Mapping[int, str]) -> pa.Table:
    ids = [group.id for group in groups]
    if len(set(ids)) != len(ids):
        raise ValueError("groups must have unique ids")
    pairs = [(group.prompt, sample) for group in groups for sample in group.samples]
    for group in groups:
        for s in group.samples:
            if (s.group_id, s.prompt_id) != (group.id, group.prompt.id):
                raise ValueError(f"sample {s.id}: must belong to group {group.id} and prompt {group.prompt.id}")
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
        "prompt_token_ids": make_list_column([p.token_ids for p in prompts], SCHEMA.field("prompt_token_ids").type),
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
        "token_ids": make_list_column([s.token_ids for s in samples], SCHEMA.field("token_ids").type),
        "loss_mask": make_list_column([s.loss_mask for s in samples], SCHEMA.field("loss_mask").type),
        "rollout_logprobs": make_list_column(
            [s.rollout_logprobs for s in samples], SCHEMA.field("rollout_logprobs").type
        ),
        "versions": [[{"version": v.version, "start": v.start, "end": v.end} for v in s.versions] for s in samples],
        "sampling": [make_sampling_row(s.sampling) for s in samples],
        "sampling_options": [to_json(s.sampling.optional) if s.sampling.optional else None for s in samples],
        "stop_reason": [s.stop_reason.value for s in samples],
        "error": [s.error for s in samples],
        "reward": [score and score.value for score in scores],
        "components": [list(score.components.items()) if score else None for score in scores],
        "reward_error": [score.error if score else None for score in scores],
        "token_rewards": [list(s.token_rewards.items()) if s and s.token_rewards else None for s in scores],
        "kept": make_kept_column([s.kept for s in samples]),
        "experts": read_expert_rows([s.experts for s in samples]),
        "teacher_logprobs": [s.teacher_logprobs for s in samples],
        "teacher_top": read_top_rows([s.teacher_top for s in samples]),
        "is_baseline": [s.is_baseline for s in samples],
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
            sampling=_sampling(row, known),
            text=row["text"],
            stop_reason=StopReason(row["stop_reason"]),
            error=row["error"],
            kept=kept[i],
            experts=read_experts(row["experts"], len(arrays["token_ids"][i])),
            teacher_logprobs=_floats(row["teacher_logprobs"]),
            teacher_top=read_top(row["teacher_top"], int(arrays["loss_mask"][i].sum())),
            score=_score(row),
            is_baseline=_is_baseline(row),
            metadata=from_json(row["metadata"]),
            timings=dict(row["timings"]),
        )


def _is_baseline(row: Mapping[str, Any]) -> bool:
    if row["is_baseline"] is None:  # files of earlier versions mark greedy rollouts in their metadata
        return bool(from_json(row["metadata"]).get("baseline") is True)
    return bool(row["is_baseline"])


def _floats(values: Sequence[float] | None) -> Floats | None:
    return None if values is None else np.array(values, np.float32)


def _rows(table: pa.Table, names: Iterable[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.select(list(names)).to_pylist()
    return rows


def _score(row: Mapping[str, Any]) -> Score | None:
    if row["reward"] is None:
        return None
    return Score(
        value=row["reward"],
        components=dict(row["components"]),
        error=row["reward_error"],
        token_rewards=dict(row["token_rewards"] or ()),
    )


def _sampling(row: Mapping[str, Any], known: dict[str, SamplingParams]) -> SamplingParams:
    key = to_json([row["sampling"], row["sampling_options"]])
    if key not in known:
        known[key] = read_sampling(row["sampling"], row["sampling_options"])
    return known[key]
