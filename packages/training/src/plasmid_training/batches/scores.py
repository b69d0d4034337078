"""Per-token scores of a model, and their cache between scoring and training. T tokens of a rank's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from plasmid.protocols import SampleScores
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from plasmid.types.top_tokens import TopTokens
from torch import Tensor

from .peers import PeerRanks
from .rank_batch import RankBatch

Scores = Tensor | TopTokens
"""[T] log-probabilities (for the critic: values), or the top tokens at the loss tokens, which stay on the host."""


def select_values(scores: Mapping[Role, Scores]) -> dict[Role, Tensor]:
    """Return the scores that are one number per token."""
    return {role: found for role, found in scores.items() if isinstance(found, Tensor)}


def split_scores(scores: Scores, rows: Rows) -> tuple[SampleScores, ...]:
    """Split the scores of the rank's tokens into those of each sample."""
    if isinstance(scores, TopTokens):
        ends = np.append(0, np.cumsum(rows.loss_mask))[rows.offsets].tolist()
        return tuple(scores.select(slice(*span)) for span in pairwise(ends))
    return split_values(scores, rows)


def split_values(values: Tensor, rows: Rows) -> tuple[Floats, ...]:
    """Split values [T] of the rank's tokens into those [L] of each sample."""
    return tuple(np.split(values.cpu().numpy(), rows.offsets[1:-1])) if rows.num_samples else ()


def join_scores(parts: Sequence[SampleScores], *, device: torch.device) -> Scores:
    """Undo `split_scores`. Returns an empty tensor if there are no samples."""
    tops = [part for part in parts if isinstance(part, TopTokens)]
    if tops:
        return TopTokens.concat(tops)
    return join_values([part for part in parts if not isinstance(part, TopTokens)], device=device)


def join_values(parts: Sequence[Floats], *, device: torch.device) -> Tensor:
    """Undo `split_values`."""
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts])).to(device)


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
