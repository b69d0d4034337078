"""Checks of a run that was killed and resumed many times: nothing is sampled again, lost or trained on twice."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plasmid.types import StopReason
from plasmid_runtime.checkpoint.folder import CheckpointFolder, RunState, read_state
from plasmid_runtime.checkpoint.saver import BUFFER, IN_FLIGHT
from plasmid_runtime.observe.journal import read_journal
from plasmid_runtime.observe.sample_store import read_dropped, read_samples
from plasmid_runtime.rollout.in_flight import read_turns


@dataclass(frozen=True)
class Attempt:
    """One start of the run: the checkpoint that it resumes from, and the file to which its engine appends each
    request."""

    requests: Path
    """One JSON list per line: request id and number of tokens sampled before."""
    state: RunState | None
    """None if there was no checkpoint."""
    turns: dict


def newest_checkpoint(run):
    found = CheckpointFolder.list_complete(run / "checkpoints")
    return found[-1] if found else None


def begin_attempt(run, requests):
    """Record what the attempt that is started next resumes from."""
    path = newest_checkpoint(run)
    return Attempt(requests, read_state(path) if path else None, read_turns(path / IN_FLIGHT) if path else {})


def check_attempts(run, attempts):
    """Return counts of what was resumed.

    Raises `AssertionError` if tokens sampled before a checkpoint were sampled again or lost.
    """
    counts = {"resumed": 0, "with_rollouts": 0, "ended_turns": 0, "open_turns": 0, "tokens": 0, "traced": 0}
    final = _final_samples(run)
    for attempt in attempts:
        if attempt.state is None:
            continue
        counts["resumed"] += 1
        counts["with_rollouts"] += bool(attempt.turns)
        asked = [json.loads(line) for line in attempt.requests.read_text().splitlines() if line.endswith("]")]
        asked = [(id_, tokens) for id_, tokens in asked if not id_.startswith("canary/")]
        pending = {item["id"] for item in attempt.state.producer["pending"]}
        assert {int(name) for name in attempt.turns} <= pending
        for id_, _ in asked:
            draw = int(id_.split("/")[0])
            assert draw in pending or draw >= attempt.state.producer["next"], (
                f"{id_}: drawn again after its group ended"
            )
        for turn in (turn for turns in attempt.turns.values() for turn in turns):
            counts["traced"] += _check_turn(turn, asked, final)
            counts["open_turns" if turn.completion.stop_reason is StopReason.ABORT else "ended_turns"] += 1
            counts["tokens"] += len(turn.completion.token_ids)
    return counts


def check_draws(run, prompts_per_batch):
    """Check that every draw was either trained on, dropped, or is waiting, and that batches have the right number of
    groups."""
    files = sorted((run / "samples").glob("*.parquet"))
    ids = [group.id for path in files for group in read_samples(path)]
    for path in (path for path in files if path.name.startswith("batch-")):
        assert len({group.id for group in read_samples(path)} - set(read_dropped(path))) == prompts_per_batch
    newest = newest_checkpoint(run)
    state = read_state(newest).producer
    waiting = [item["id"] for item in state["pending"]]
    waiting += [group.id for group in read_samples(newest / BUFFER)] if (newest / BUFFER).exists() else []
    assert sorted([*ids, *waiting]) == list(range(state["next"])), "a draw was lost or done twice"
    steps = [entry.step for entry in read_journal(run / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) == read_state(newest).batch


def _final_samples(run):
    paths = sorted((run / "samples").glob("*.parquet"))
    groups = [
        group for path in [*paths, newest_checkpoint(run) / BUFFER] if path.exists() for group in read_samples(path)
    ]
    return {sample.rollout_id: sample for group in groups for sample in group.samples}


def _check_turn(turn, asked, final):
    """Check that no token of the turn is sampled again, and that its sample, if complete, contains all of them."""
    drawn = turn.completion
    positions = [count for id_, count in asked if id_ == drawn.request_id]
    if drawn.stop_reason is StopReason.ABORT:
        assert all(count >= len(drawn.token_ids) for count in positions), "a token was drawn again"
    else:
        assert not positions, "a turn was drawn again"
    if turn.rollout_id not in final:
        return False  # not complete after the last batch
    sample = final[turn.rollout_id]
    start = _turn_starts(sample)[turn.number] if len(drawn.token_ids) else 0
    part = slice(start, start + len(drawn.token_ids))
    assert sample.token_ids[part].tolist() == drawn.token_ids.tolist()
    assert sample.rollout_logprobs[part].tolist() == drawn.logprobs.tolist(), "a token was drawn again"
    versions = np.full(len(sample.token_ids), -1)
    for span in sample.versions:
        versions[span.start : span.end] = span.version
    assert versions[part].tolist() == [span.version for span in drawn.versions for _ in range(span.start, span.end)]
    return True


def _turn_starts(sample):
    """Return where each turn begins: between two turns is at least one token that was not sampled."""
    drawn = np.concatenate([[False], sample.loss_mask.astype(bool)])
    return np.flatnonzero(drawn[1:] & ~drawn[:-1])
