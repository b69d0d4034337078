"""Tokens of unfinished rollouts, and the checkpoint file that stores them.

The file has one row for each request of a rollout: finished, or in progress with stop reason ``abort``. A resumed
rollout runs its workflow from the beginning. Requests in the file are answered from it, without the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from plasmid.errors import CheckpointError
from plasmid.protocols import EngineClient
from plasmid.types import Completion, StopReason, VersionSpan
from plasmid.utils.safe_files import replace_file
from plasmid_workflows.execution import Execution
from plasmid_workflows.turns import Turn

from ..observe.sample_columns import SCHEMA as SAMPLE_SCHEMA
from ..observe.sample_columns import (
    Lists,
    make_kept_column,
    make_list_column,
    read_expert_rows,
    read_experts,
    read_kept_sets,
)
from ..observe.sample_store import UNREADABLE

ARRIVAL_S = 2.0
"""Maximum time to wait for completions that the engine has finished but not delivered, in seconds."""
SCHEMA = pa.schema(
    [
        ("job", pa.string()),
        ("rollout_id", pa.string()),
        ("turn", pa.int64()),
        ("seed", pa.int64()),
        ("request_hash", pa.string()),
        ("stop_reason", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        *((name, SAMPLE_SCHEMA.field(name).type) for name in ("versions", "kept", "experts", "timings")),
    ]
)


@dataclass(slots=True, eq=False)
class JobProgress:
    """The rollouts of an unfinished job."""

    resumed: dict[str, dict[int, Turn]] = field(default_factory=dict)
    """Turns from a checkpoint, for rollouts that have not restarted after the resume, by rollout id and turn number."""
    rollouts: list[Execution] = field(default_factory=list)

    def resume(self, turns: Sequence[Turn]) -> None:
        """Store turns from a checkpoint, from which the rollouts of the job continue when they start."""
        for turn in turns:
            self.resumed.setdefault(turn.rollout_id, {})[turn.number] = turn


async def record_turns(client: EngineClient, jobs: Mapping[str, JobProgress]) -> dict[str, tuple[Turn, ...]]:
    """Return the turns that the rollouts of each job have generated so far, by job name. The engine is not interrupted.

    The last turn of a rollout may be incomplete. Omits jobs without generated tokens.
    """
    rollouts = [rollout for job in jobs.values() for rollout in job.rollouts]
    known = dict(zip(map(id, rollouts), await _record_rollouts(client, rollouts), strict=True))
    found = {}
    for name, job in jobs.items():
        waiting = [turn for turns in job.resumed.values() for turn in turns.values()]
        found[name] = (*(turn for rollout in job.rollouts for turn in known.get(id(rollout), ())), *waiting)
    return {name: turns for name, turns in found.items() if turns}


async def _record_rollouts(client: EngineClient, rollouts: Sequence[Execution]) -> list[tuple[Turn, ...]]:
    waiting = {
        id_: turn.answer
        for rollout in rollouts
        for id_, turn in rollout.open_turns.items()
        if turn.answer is not None and not turn.answer.done()
    }
    found = {part.request_id: part for part in await client.fetch_partial(list(waiting))} if waiting else {}
    if arriving := [answer for id_, answer in waiting.items() if id_ not in found]:
        await asyncio.wait(arriving, timeout=ARRIVAL_S)

    def part(id_: str, answer: asyncio.Future[Completion] | None) -> Completion | None:
        """Return the completion so far of a turn's open request; None if there is none or it failed."""
        if answer is not None and answer.done():
            failed = answer.cancelled() or answer.exception() or answer.result().stop_reason is StopReason.ERROR
            return None if failed else answer.result()
        # if the turn has sent another request in the meantime, the partial completion belongs to the earlier one
        return found.get(id_) if answer is waiting.get(id_) else None

    turns = []
    for rollout in rollouts:
        drawn = [turn.record(part(id_, turn.answer)) for id_, turn in rollout.open_turns.items()]
        known = [*rollout.ended_turns, *(turn for turn in drawn if turn is not None), *rollout.resumed.values()]
        turns.append(tuple(sorted(known, key=lambda turn: turn.number)))
    return turns


def write_turns(path: Path, jobs: Mapping[str, Sequence[Turn]]) -> None:
    """Write turns by the name of their job. Raises `CheckpointError`."""
    rows = [(job, turn) for job, turns in jobs.items() for turn in turns]
    drawn = [turn.completion for _, turn in rows]
    columns: dict[str, Any] = {
        "job": [job for job, _ in rows],
        "rollout_id": [turn.rollout_id for _, turn in rows],
        "turn": [turn.number for _, turn in rows],
        "seed": [turn.seed for _, turn in rows],
        "request_hash": [turn.request_hash for _, turn in rows],
        "stop_reason": [completion.stop_reason.value for completion in drawn],
        "token_ids": make_list_column([completion.token_ids for completion in drawn], SCHEMA.field("token_ids").type),
        "logprobs": make_list_column([completion.logprobs for completion in drawn], SCHEMA.field("logprobs").type),
        "versions": [[{"version": v.version, "start": v.start, "end": v.end} for v in c.versions] for c in drawn],
        "kept": make_kept_column([completion.kept for completion in drawn]),
        "experts": read_expert_rows([completion.experts for completion in drawn]),
        "timings": [list(completion.timings.items()) for completion in drawn],
    }
    table = pa.table([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)
    try:
        with replace_file(path, durable=True) as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot write rollouts in flight: {error.strerror or error}") from error


def read_turns(path: Path) -> dict[str, tuple[Turn, ...]]:
    """Read the output of `write_turns`; empty if there is no file. Raises `CheckpointError`."""
    if not path.exists():
        return {}
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
        missing = [name for name in ("experts",) if name not in table.column_names]  # of earlier versions
        for name in missing:
            index = SCHEMA.get_field_index(name)
            table = table.add_column(index, SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type))
        if not table.schema.equals(SCHEMA):
            raise ValueError("wrong columns")
        jobs: dict[str, list[Turn]] = {}
        for job, turn in zip(table.column("job").to_pylist(), _turns(table), strict=True):
            jobs.setdefault(job, []).append(turn)
        return {job: tuple(turns) for job, turns in jobs.items()}
    except (OSError, *UNREADABLE) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: not a file of rollouts in flight: {reason}") from None


def _turns(table: pa.Table) -> list[Turn]:
    token_ids, logprobs = Lists(table.column("token_ids")), Lists(table.column("logprobs"))
    kept = read_kept_sets(table.column("kept"))
    turns = []
    for i, row in enumerate(table.drop_columns(["token_ids", "logprobs", "kept"]).to_pylist()):
        completion = Completion(
            request_id=f"{row['rollout_id']}#{row['turn']}",
            token_ids=token_ids[i],
            logprobs=logprobs[i],
            versions=tuple(VersionSpan(**span) for span in row["versions"]),
            stop_reason=StopReason(row["stop_reason"]),
            kept=kept[i],
            experts=read_experts(row["experts"], -1),
            timings=dict(row["timings"]),
        )
        _check_lengths(completion)
        about = {name: row[name] for name in ("rollout_id", "seed", "request_hash")}
        turns.append(Turn(**about, number=row["turn"], completion=completion))
    return turns


def _check_lengths(completion: Completion) -> None:
    """Raise ValueError unless log-probabilities, versions and kept sets match the number of tokens."""
    count, ends = len(completion.token_ids), [0, *(span.end for span in completion.versions)]
    starts = [*(span.start for span in completion.versions), count]
    kept = completion.kept.num_positions if completion.kept is not None else count
    if len(completion.logprobs) != count or kept != count or starts != ends or sorted(ends) != ends:
        raise ValueError(
            f"turn {completion.request_id} has {count} tokens, but its logprobs, versions or kept sets do not match"
        )
