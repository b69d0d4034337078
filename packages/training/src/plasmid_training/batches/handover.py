"""Scores on their way from scoring to training: kept on the ranks, by sample id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from plasmid.types import Floats, Role
from plasmid.types.batch import Rows
from torch import Tensor

from .rank_batch import RankBatch


class Peers(Protocol):
    """The ranks that hold the other parts of a batch, as one of them sees them. All call every method together."""

    @property
    def device(self) -> torch.device:
        """Where scores live."""
        ...

    def any(self, value: bool) -> bool:
        """True if it is on any rank."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """One rank's samples of a batch and what is known of them."""

    rows: Rows
    scores: dict[Role, Tensor] = field(default_factory=dict)
    """[T] each."""


class Handover:
    """What one rank keeps between scoring and training. All ranks call every method together."""

    def __init__(self, ranks: Peers) -> None:
        self._ranks = ranks
        self._kept: dict[int, Kept] = {}

    def rows(self, batch: RankBatch) -> Rows:
        """The rank's samples, fetched unless they are here already."""
        kept = self._kept.get(batch.index)
        return kept.rows if kept is not None and kept.rows.sample_ids == _ids(batch) else batch.fetch()

    def keep(self, batch: RankBatch, rows: Rows, scores: Mapping[Role, Tensor]) -> None:
        """Keep scores [T] of the rows until the batch is trained; what other roles scored of the same rows stays."""
        kept = self._kept.get(batch.index)
        if kept is None or kept.rows.sample_ids != rows.sample_ids:
            kept = self._kept[batch.index] = Kept(rows=rows)
        kept.scores.update(scores)

    def take(self, batch: RankBatch) -> tuple[Rows, dict[Role, Tensor]]:
        """The rank's samples and their scores, which are forgotten.

        If the batch was dealt out otherwise when it was scored, the ranks exchange scores. Raises ValueError if a
        sample was not scored.
        """
        kept = self._kept.pop(batch.index, None)
        if kept is None:
            return batch.fetch(), {}
        if not self._ranks.any(kept.rows.sample_ids != _ids(batch)):
            return kept.rows, kept.scores
        known = {role: _by_id(kept.rows, values) for role, values in kept.scores.items()}
        parts = self._ranks.gather(known)
        rows = batch.fetch()
        return rows, {role: self._align(batch, rows, [part[role] for part in parts]) for role in known}

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def _align(self, batch: RankBatch, rows: Rows, parts: list[dict[str, Floats]]) -> Tensor:
        everywhere = {id_: values for part in parts for id_, values in part.items()}
        missing = [id_ for id_ in rows.sample_ids if id_ not in everywhere]
        if missing:
            raise ValueError(f"batch {batch.index}: sample {missing[0]} was not scored")
        own = [everywhere[id_] for id_ in rows.sample_ids]
        return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *own])).to(self._ranks.device)


def _ids(batch: RankBatch) -> tuple[str, ...]:
    return tuple(batch.table.sample_ids[i] for i in batch.samples)


def _by_id(rows: Rows, values: Tensor) -> dict[str, Floats]:
    parts = np.split(values.cpu().numpy(), rows.offsets[1:-1]) if rows.num_samples else []
    return dict(zip(rows.sample_ids, parts, strict=True))
