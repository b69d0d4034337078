"""From flat rows to the padded tensors of one microbatch. B samples, S the longest, P tokens that are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import Rows
from .kept_tokens import KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Padded rows for the model, and flat views of the predicted tokens for everything after it.

    Predicted tokens come sample after sample, in order. Without any sample the rows are one dummy token and P is 0, so
    that a rank without work still takes part in every collective.
    """

    input_ids: Tensor
    """[B, S] int64, padded on the right with 0."""
    attention_mask: Tensor
    """[B, S] int64: 1 on tokens, 0 on padding."""
    position_ids: Tensor
    """[B, S] int64: 0, 1, ... also over padding."""
    source: Tensor
    """[P] int64: which of the B * S hidden states predicts the token (the one before it)."""
    targets: Tensor
    """[P] int64: the token."""
    mask: Tensor
    """[P] bool: the loss mask."""
    sample_index: Tensor
    """[P] int64: 0..B-1."""
    table_index: Tensor
    """[P] int64: row of the batch table."""
    token_index: Tensor
    """[P] int64: place of the token in the rank's rows, for reading and writing per-token scores [T]."""
    temperatures: Tensor
    """[P] float32."""
    rollout_logprobs: Tensor
    """[P] float32: of what drew the token, within its kept set."""
    kept: KeptTokens | None
    """P positions: what each token was drawn from; None if no sample of the rank has it."""
    versions: Tensor
    """[P] int64: policy version that drew the token, -1 where none did."""

    @property
    def num_predicted(self) -> int:
        """P."""
        return self.targets.numel()

    def to(self, device: torch.device | str) -> Microbatch:
        """The same on a device."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: None if v is None else v.to(device, non_blocking=True) for k, v in parts.items()}
        return Microbatch(**moved)


def collate(
    rows: Rows, indices: Sequence[int], *, table_index: Sequence[int] | NDArray[np.int64], only_masked: bool = True
) -> Microbatch:
    """Tensors of the samples ``indices`` of a rank's rows; ``table_index`` [n] are all those rows' rows of the table.

    ``only_masked`` predicts only tokens that the loss sees, which saves the vocabulary head the others. Without it
    every token but the first of each sample is predicted. Raises ValueError if the loss sees a first token.
    """
    index = np.asarray(indices, np.int64)
    starts, lengths = rows.offsets[index], rows.lengths()[index]
    width = int(lengths.max()) if len(index) else 1
    columns = np.arange(width)
    filled = columns[None, :] < lengths[:, None]  # [B, S]
    places = np.where(filled, starts[:, None] + columns[None, :], 0)
    loss_mask = filled & rows.loss_mask[places] if len(index) else filled
    if loss_mask[:, :1].any():
        first = int(np.flatnonzero(loss_mask[:, 0])[0])
        raise ValueError(f"sample {rows.sample_ids[index[first]]}: nothing predicts the first token; mask it out")
    chosen = loss_mask if only_masked else filled & (columns > 0)[None, :]
    row, column = np.nonzero(chosen)
    token = places[row, column]
    padded = max(len(index), 1)
    input_ids = np.where(filled, rows.token_ids[places], 0) if len(index) else np.zeros((1, 1))
    return Microbatch(
        input_ids=_long(input_ids),
        attention_mask=_long(filled if len(index) else np.ones((1, 1))),
        position_ids=torch.arange(width).repeat(padded, 1),
        source=_long(row * width + column - 1),
        targets=_long(rows.token_ids[token]),
        mask=torch.from_numpy(rows.loss_mask[token]),
        sample_index=_long(row),
        table_index=_long(np.asarray(table_index, np.int64)[index][row]),
        token_index=_long(token),
        temperatures=torch.from_numpy(rows.temperatures[index][row]),
        rollout_logprobs=torch.from_numpy(rows.behaviour_logprobs(token)),
        kept=_kept(rows, token),
        versions=_long(rows.versions[token]),
    )


def _kept(rows: Rows, token: NDArray[np.int64]) -> KeptTokens | None:
    """The sets of the tokens [P]. Raises ValueError for a token outside of its own set, which nothing could draw."""
    if rows.kept is None:
        return None
    kept = rows.kept.select(token)
    sizes = kept.sizes()
    found = kept.token_ids == np.repeat(rows.token_ids[token], sizes)
    owner = np.repeat(np.arange(len(token)), sizes)
    lost = np.flatnonzero((sizes > 0) & (np.bincount(owner[found], minlength=len(token)) != 1))
    if len(lost):
        place = int(token[lost[0]])
        sample = int(np.searchsorted(rows.offsets, place, side="right")) - 1
        raise ValueError(
            f"sample {rows.sample_ids[sample]}: token {place - int(rows.offsets[sample])} is not once in the set that "
            "it was drawn from"
        )
    return KeptTokens.of(kept)


def _long(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.int64))
