"""Cache of scores on each rank between scoring and training, by sample id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plasmid.protocols import SampleScores
from plasmid.types import Role
from plasmid.types.batch import Rows

from ..rank.peers import PeerRanks
from .rank_batch import RankBatch
from .scores import Scores, join_scores, split_scores


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """One rank's samples of a batch and their scores."""

    rows: Rows
    scores: dict[Role, Scores] = field(default_factory=dict)


class ScoreCache:
    """Scores that one rank keeps between scoring and training. All ranks call every method together."""

    def __init__(self, ranks: PeerRanks) -> None:
        self._ranks = ranks
        self._entries: dict[int, _Entry] = {}

    def rows(self, batch: RankBatch) -> Rows:
        """Return the rank's samples, fetching them unless they are cached."""
        entry = self._entries.get(batch.index)
        return entry.rows if entry is not None and entry.rows.sample_ids == _ids(batch) else batch.fetch()

    def put(self, batch: RankBatch, rows: Rows, scores: Mapping[Role, Scores]) -> None:
        """Cache scores of the rows until the batch is trained; scores of other roles for the same rows are kept."""
        entry = self._entries.get(batch.index)
        if entry is None or entry.rows.sample_ids != rows.sample_ids:
            entry = self._entries[batch.index] = _Entry(rows=rows)
        entry.scores.update(scores)

    def take(self, batch: RankBatch) -> tuple[Rows, dict[Role, Scores]]:
        """Return the rank's samples and their scores as `read` does, and remove them from the cache."""
        found = self.read(batch)
        self._entries.pop(batch.index, None)
        return found

    def read(self, batch: RankBatch) -> tuple[Rows, dict[Role, Scores]]:
        """Return the rank's samples and their scores.

        If the batch was split differently when it was scored, the ranks exchange scores. Raises ValueError if a sample
        was not scored.
        """
        entry = self._entries.get(batch.index)
        if entry is None:
            return batch.fetch(), {}
        if not self._ranks.any(entry.rows.sample_ids != _ids(batch)):
            return entry.rows, dict(entry.scores)
        ids = entry.rows.sample_ids
        known = {
            role: dict(zip(ids, split_scores(found, entry.rows), strict=True)) for role, found in entry.scores.items()
        }
        parts = self._ranks.gather(known)
        rows = batch.fetch()
        return rows, {role: self._align(batch, rows, [part[role] for part in parts]) for role in known}

    def clear(self) -> None:
        """Empty the cache."""
        self._entries.clear()

    def _align(self, batch: RankBatch, rows: Rows, parts: list[dict[str, SampleScores]]) -> Scores:
        everywhere = {id_: values for part in parts for id_, values in part.items()}
        missing = [id_ for id_ in rows.sample_ids if id_ not in everywhere]
        if missing:
            raise ValueError(f"batch {batch.index}: sample {missing[0]} was not scored")
        own = [everywhere[id_] for id_ in rows.sample_ids]
        return join_scores(own, device=self._ranks.device)


def _ids(batch: RankBatch) -> tuple[str, ...]:
    return tuple(batch.table.sample_ids[i] for i in batch.samples)
