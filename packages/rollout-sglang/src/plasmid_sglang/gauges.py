"""What servers say of their load, as the flat names of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Load = Mapping[str, float]
"""Gauges of one scheduler: names as in SGLang's /v1/loads, those of a section as ``section.name``."""
SUMS = {"tokens_per_s": "gen_throughput", "running": "num_running_reqs", "queued": "num_waiting_reqs"}
MEANS = {
    "kv_usage": "token_usage",
    "cache_hit_rate": "cache_hit_rate",
    "accept_length": "speculative.accept_length",
    "accept_rate": "speculative.accept_rate",
}
"""The last two are told by servers with speculative decoding only."""


def flat(load: Mapping[str, Any]) -> Load:
    """The numbers in one answer, those one level deeper included."""
    found: dict[str, float] = {}
    for name, value in load.items():
        inner = value if isinstance(value, Mapping) else {"": value}
        for key, number in inner.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[f"{name}.{key}" if key else name] = float(number)
    return found


def gauges(loads: Mapping[str, Sequence[Load]]) -> dict[str, float]:
    """``engine/...`` out of the loads of each server, by its name: sums over all schedulers, means of fractions.

    The speed is also given for each server. What no scheduler tells is left out.
    """
    every = [load for own in loads.values() for load in own]
    found = {f"engine/{name}": sum(load.get(key, 0.0) for load in every) for name, key in SUMS.items()}
    for name, key in MEANS.items():
        values = [load[key] for load in every if key in load]
        if values:
            found[f"engine/{name}"] = sum(values) / len(values)
    for server, own in loads.items():
        found[f"engine/{server}/tokens_per_s"] = sum(load.get(SUMS["tokens_per_s"], 0.0) for load in own)
    return found


def busy(loads: Sequence[Load]) -> float:
    """Requests that run or wait."""
    return sum(load[SUMS["running"]] + load[SUMS["queued"]] for load in loads)
