"""Collation of a rank's rows into microbatches: B packed samples, T tokens, P predicted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plasmid.types.batch import Rows
from plasmid.types.routing import get_unknown_id
from torch import Tensor

from ..head.kept_tokens import KeptTokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """The tokens of whole samples without padding, and the data of the predicted tokens.

    Predicted tokens are ordered by sample and position. A microbatch without samples has one dummy token and P = 0, so
    that a rank without work still takes part in every collective. Among samples that share a prefix, the first has all
    its tokens and the others only those after the prefix; only `token_ids` and `source` depend on the sharing.
    """

    token_ids: Tensor
    """[T] int64."""
    lengths: tuple[int, ...]
    """Number of tokens of each of the B samples, including shared ones; (1,) for the dummy token."""
    source: Tensor
    """[P] int64: index among the T tokens of the one that predicts the token (its predecessor)."""
    targets: Tensor
    """[P] int64: the predicted token."""
    mask: Tensor
    """[P] bool: the loss mask."""
    sample_index: Tensor
    """[P] int64: 0..B-1."""
    table_index: Tensor
    """[P] int64: row of the batch table."""
    token_index: Tensor
    """[P] int64: index of the token in the rank's rows, to read and write per-token scores."""
    temperatures: Tensor
    """[P] float32."""
    rollout_logprobs: Tensor
    """[P] float32: log-probability under the sampling policy, within the token's kept set."""
    kept: KeptTokens | None
    """Kept sets of P positions, from which the tokens were sampled; None if no sample of the rank has any."""
    versions: Tensor
    """[P] int64: policy version that sampled the token, -1 if it was not sampled."""
    teacher_top_ids: Tensor | None = None
    """[P, K] int32: the teacher's top tokens; None without a teacher's, or if not only loss tokens are predicted."""
    teacher_top_logprobs: Tensor | None = None
    """[P, K] float32: their log-probabilities by the teacher."""
    experts: Tensor | None = None
    """[T, layers, choices] int16: the experts that the engine chose for each token, -1 if unknown; None if no sample
    has any. Tokens of a shared prefix have those of the first sample."""
    prefix_lengths: tuple[int, ...] = ()
    """[B] number of leading tokens that each sample shares with an earlier one; empty if there are none."""
    prefix_starts: tuple[int, ...] = ()
    """[B] where the shared prefixes begin among the T tokens."""

    @property
    def num_predicted(self) -> int:
        """Number of predicted tokens, P."""
        return self.targets.numel()

    def to(self, device: torch.device | str) -> Microbatch:
        """Return a copy on a device."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, part in parts.items():
            if isinstance(part, Tensor | KeptTokens):
                parts[name] = part.to(device, non_blocking=True)
        return Microbatch(**parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """Prefixes that a rank's n rows have in common."""

    groups: NDArray[np.int64]
    """[n] group of each row; rows of a group share a prefix."""
    lengths: NDArray[np.int64]
    """[n] length of the prefix in tokens, the same for all rows of a group; 0 for groups that are not shared."""


def collate(
    rows: Rows,
    indices: Sequence[int],
    *,
    table_index: Sequence[int] | NDArray[np.int64],
    only_masked: bool = True,
    shared: SharedPrefixes | None = None,
) -> Microbatch:
    """Build the microbatch of the samples ``indices`` of a rank's rows; ``table_index`` [n] are the rows of the table.

    With ``only_masked`` only tokens in the loss mask are predicted, which saves computing the vocabulary head for the
    others; otherwise all tokens except the first of each sample. ``shared`` tokens are included once. Raises ValueError
    if the loss mask includes a first token, or if shared tokens differ.
    """
    index = np.asarray(indices, np.int64)
    starts, lengths = rows.offsets[index], rows.lengths()[index]
    first, prefixes = _find_prefixes(index, shared)
    own = lengths - prefixes
    begins = np.cumsum(own) - own  # start of each sample's own tokens among the T
    sample = np.repeat(np.arange(len(index)), lengths)  # of each token; shared tokens are repeated for each sample
    column = np.arange(len(sample)) - (np.cumsum(lengths) - lengths)[sample]
    places = starts[sample] + column
    is_own = column >= prefixes[sample]
    packed = np.where(is_own, begins[sample] + column - prefixes[sample], begins[first[sample]] + column)
    tokens = rows.token_ids[places[is_own]]
    if not np.array_equal(tokens[packed], rows.token_ids[places]):
        raise ValueError("the samples of a group do not begin with their shared prefix")
    loss_mask = rows.loss_mask[places]
    if (loss_mask & (column == 0)).any():
        wrong = int(sample[np.flatnonzero(loss_mask & (column == 0))[0]])
        raise ValueError(f"sample {rows.sample_ids[index[wrong]]}: the first token is in the loss mask; mask it out")
    predicted = np.flatnonzero(loss_mask if only_masked else column > 0)
    row, token = sample[predicted], places[predicted]
    top = rows.teacher_top.select(rows.loss_index()[token]) if rows.teacher_top is not None and only_masked else None
    return Microbatch(
        token_ids=_to_long(tokens if len(index) else np.zeros(1)),
        lengths=tuple(lengths.tolist()) or (1,),
        source=_to_long(packed[predicted - 1]),
        targets=_to_long(rows.token_ids[token]),
        mask=torch.from_numpy(rows.loss_mask[token]),
        sample_index=_to_long(row),
        table_index=_to_long(np.asarray(table_index, np.int64)[index][row]),
        token_index=_to_long(token),
        temperatures=torch.from_numpy(rows.temperatures[index][row]),
        rollout_logprobs=torch.from_numpy(rows.behaviour_logprobs(token)),
        kept=_kept_tokens(rows, token),
        versions=_to_long(rows.versions[token]),
        teacher_top_ids=None if top is None else torch.from_numpy(top.token_ids),
        teacher_top_logprobs=None if top is None else torch.from_numpy(top.logprobs),
        experts=_experts(rows, places[is_own]),
        prefix_lengths=tuple(prefixes.tolist()) if prefixes.any() else (),
        prefix_starts=tuple(begins[first].tolist()) if prefixes.any() else (),
    )


def _find_prefixes(
    index: NDArray[np.int64], shared: SharedPrefixes | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first sample [B] with the same prefix, and the number of tokens [B] that each sample reuses of it."""
    own = np.arange(len(index))
    if shared is None:
        return own, np.zeros_like(own)
    _, firsts, inverse = np.unique(shared.groups[index], return_index=True, return_inverse=True)
    first = firsts[inverse]
    return first, np.where(first == own, 0, shared.lengths[index])


def _kept_tokens(rows: Rows, token: NDArray[np.int64]) -> KeptTokens | None:
    """Return the kept sets of the tokens [P]. Raises `ValueError` if a token is not in its kept set."""
    if rows.kept is None:
        return None
    kept = rows.kept.select(token)
    sizes = kept.sizes()
    found = kept.token_ids == np.repeat(rows.token_ids[token], sizes)
    owner = np.repeat(np.arange(len(token)), sizes)
    wrong = np.flatnonzero((sizes > 0) & (np.bincount(owner[found], minlength=len(token)) != 1))
    if len(wrong):
        place = int(token[wrong[0]])
        sample = int(np.searchsorted(rows.offsets, place, side="right")) - 1
        raise ValueError(
            f"sample {rows.sample_ids[sample]}: token {place - int(rows.offsets[sample])} must occur once in its "
            "kept set"
        )
    return KeptTokens.of(kept)


def _experts(rows: Rows, places: NDArray[np.int64]) -> Tensor | None:
    """Return the experts of the tokens that are computed."""
    if rows.experts is None or not len(places):
        return None
    experts = rows.experts[places]
    return torch.from_numpy(np.where(experts == get_unknown_id(experts.dtype), -1, experts.astype(np.int16)))


def _to_long(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).astype(np.int64))
