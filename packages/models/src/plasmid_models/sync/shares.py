"""Division of a weight sync over the trainer's ranks: who gathers and sends which weights, in which bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

Round = Mapping[str, int]
"""Rank that sends each weight, by `Gatherable.key`. Every rank sends at most one bucket in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gatherable:
    """One weight that a rank gathers as a whole, possibly several tensors of the model folder."""

    key: str
    num_bytes: int
    ranks: tuple[int, ...]
    """Ranks that can gather it, in ascending order."""


@dataclass(slots=True)
class _Share:
    """Weights of one rank."""

    num_bytes: int = 0
    last: int = 0
    """Bytes of the last bucket."""
    buckets: list[list[int]] = field(default_factory=list)
    """Positions of the weights in each bucket."""


def divide(weights: Sequence[Gatherable], *, bucket_bytes: int) -> list[Round]:
    """Divide the weights evenly over the ranks, and each rank's share into buckets.

    In round k, each rank sends its k-th bucket, if it has that many.

    All ranks compute the same result. Weights that few ranks can gather are assigned first, large ones before small
    ones, each to the rank with the fewest bytes. Buckets have at most ``bucket_bytes``, or a single weight, and weights
    keep their order in a rank's buckets and in a round.
    """
    shares = {rank: _Share() for weight in weights for rank in weight.ranks}
    owners: dict[int, int] = {}
    for i in sorted(range(len(weights)), key=lambda i: (len(weights[i].ranks), -weights[i].num_bytes)):
        owners[i] = min(weights[i].ranks, key=lambda rank: shares[rank].num_bytes)
        shares[owners[i]].num_bytes += weights[i].num_bytes
    for i, weight in enumerate(weights):
        share = shares[owners[i]]
        if not share.buckets or share.last + weight.num_bytes > bucket_bytes:
            share.buckets.append([])
            share.last = 0
        share.buckets[-1].append(i)
        share.last += weight.num_bytes
    rounds = zip_longest(*(share.buckets for share in shares.values()), fillvalue=())
    return [{weights[i].key: owners[i] for i in sorted(chain.from_iterable(buckets))} for buckets in rounds]


def number_buckets(rounds: Sequence[Round]) -> dict[tuple[int, int], int]:
    """Return the index of every bucket of a sync by round and rank."""
    found = [(number, rank) for number, owners in enumerate(rounds) for rank in sorted(set(owners.values()))]
    return {place: index for index, place in enumerate(found)}
