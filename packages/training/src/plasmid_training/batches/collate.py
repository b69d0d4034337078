"""From a rank's rows to the tensors of one microbatch: B samples one after another, T tokens, P that are predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.types.batch import Rows
from torch import Tensor

from ..head.kept_tokens import KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """The tokens of whole samples without padding, and what is known of those that are predicted.

    Predicted tokens come sample after sample, in order. Without any sample there is one dummy token and P is 0, so that
    a rank without work still takes part in every collective.
    """

    token_ids: Tensor
    """[T] int64."""
    lengths: tuple[int, ...]
    """Tokens of each of the B samples; of the dummy, if there is none."""
    source: Tensor
    """[P] int64: which of the T tokens predicts the token (the one before it)."""
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
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tensor | KeptTokens):
                parts[name] = part.to(device, non_blocking=True)
        return Microbatch(**parts)


def collate(
    rows: Rows, indices: Sequence[int], *, table_index: Sequence[int] | NDArray[np.int64], only_masked: bool = True
) -> Microbatch:
    """Tensors of the samples ``indices`` of a rank's rows; ``table_index`` [n] are all those rows' rows of the table.

    ``only_masked`` predicts only tokens that the loss sees, which saves the vocabulary head the others. Without it
    every token but the first of each sample is predicted. Raises ValueError if the loss sees a first token.
    """
    index = np.asarray(indices, np.int64)
    starts, lengths = rows.offsets[index], rows.lengths()[index]
    begins = np.cumsum(lengths) - lengths
    sample = np.repeat(np.arange(len(index)), lengths)  # [T]
    column = np.arange(len(sample)) - begins[sample]
    places = starts[sample] + column
    loss_mask = rows.loss_mask[places]
    if (loss_mask & (column == 0)).any():
        first = int(sample[np.flatnonzero(loss_mask & (column == 0))[0]])
        raise ValueError(f"sample {rows.sample_ids[index[first]]}: nothing predicts the first token; mask it out")
    predicted = np.flatnonzero(loss_mask if only_masked else column > 0)
    row, token = sample[predicted], places[predicted]
    return Microbatch(
        token_ids=_long(rows.token_ids[places] if len(index) else np.zeros(1)),
        lengths=tuple(lengths.tolist()) or (1,),
        source=_long(predicted - 1),
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
