"""Tokens and FLOPs of the samples of a batch, shared prefixes counted once. Indices are rows of the table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from plasmid.types.batch import BatchTable
from plasmid_models.linear_attention import DeltaNet, linear_layers

Indices = tuple[int, ...]

ATTENTION_PASSES = 3.5
"""FLOPs of attention in forward and backward pass, divided by those in the forward pass: (2 + 5) / 2 matrix products.
For a linear layer it is (1 + 2) / 1."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleCosts:
    """Costs of N samples. The unit of FLOPs is one token without attention."""

    lengths: Sequence[int]
    """[N] tokens."""
    groups: Sequence[int]
    """[N] group of each sample."""
    prefixes: Sequence[int]
    """[N] number of leading tokens that the samples of a group share, the same within a group; 0 if not shared."""
    flops: Sequence[float]
    """[N] FLOPs of each sample by itself."""
    prefix_flops: Sequence[float]
    """[N] FLOPs of its shared prefix."""

    @classmethod
    def of(
        cls, table: BatchTable, *, attention_length: float = float("inf"), min_saving: float | None = None
    ) -> SampleCosts:
        """Compute the costs of a table's samples; see `schedule.Microbatching` for the options."""
        lengths = table.lengths.astype(np.float64)
        prefixes = _shared_lengths(table, min_saving)
        flops, of_prefixes = (n + n * n / attention_length for n in (lengths, prefixes.astype(np.float64)))
        return cls(*(x.tolist() for x in (table.lengths, table.group_index, prefixes, flops, of_prefixes)))

    def unit_flops(self, unit: Sequence[int]) -> float:
        """Return the FLOPs of samples of one group that are computed together."""
        if len(unit) == 1:
            return self.flops[unit[0]]
        return sum(self.flops[i] for i in unit) - (len(unit) - 1) * self.prefix_flops[unit[0]]

    def unit_tokens(self, unit: Sequence[int]) -> int:
        """Return the packed tokens of samples of one group that are computed together."""
        return sum(self.lengths[i] for i in unit) - (len(unit) - 1) * self.prefixes[unit[0]]

    def units(self, samples: Iterable[int], pieces: int = 1) -> list[Indices]:
        """Return units of samples to compute together: single samples, and each prefix-sharing group in ``pieces``."""
        units: list[Indices] = []
        for _, group in groupby(sorted(samples), key=self.groups.__getitem__):
            members = tuple(group)
            if self.prefixes[members[0]]:
                members = tuple(sorted(members, key=lambda i: (-self.lengths[i], i)))
                units += [piece for k in range(pieces) if (piece := members[k::pieces])]
            else:
                units += [(i,) for i in members]
        return units


def _shared_lengths(table: BatchTable, min_saving: float | None) -> NDArray[np.int64]:
    """Return the shared prefix length [N] of each sample; 0 if sharing saves less than ``min_saving`` of the tokens."""
    if min_saving is None or table.shared_prefixes is None or not table.num_samples:
        return np.zeros(table.num_samples, np.int64)
    counts, totals = np.bincount(table.group_index), np.bincount(table.group_index, table.lengths)
    saved = (counts[table.group_index] - 1) * table.shared_prefixes
    pays = (saved > 0) & (saved >= min_saving * totals[table.group_index])
    return np.where(pays, table.shared_prefixes, 0)


def attention_length(config: Mapping[str, Any]) -> float:
    """Return the sample length at which attention costs as many FLOPs as everything else, from ``config.json``.

    Causal attention of L tokens has L^2 / 2 pairs with two products each; linear attention costs the same for every
    token. Only the experts that a token is routed to count. Returns infinity for configs without the usual size keys.
    """
    config = config.get("text_config") or config
    try:
        hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
        size = config.get("head_dim") or hidden // heads
        key_heads = config.get("num_key_value_heads") or heads
        active = config.get("num_experts_per_tok") or 0
        inner = active * config["moe_intermediate_size"] if active else config["intermediate_size"]
        linear = sum(linear_layers(config))
        full = layers - linear
        weights = hidden * (full * (2 * heads * size + 2 * key_heads * size) + layers * 3 * inner)
        if linear:
            net = DeltaNet.of(config)
            weights += linear * hidden * (net.projected + net.values)
        weights += hidden * config["vocab_size"]
        return float(6 * weights / (ATTENTION_PASSES * 2 * full * heads * size))
    except (KeyError, TypeError, ZeroDivisionError):
        return float("inf")
