"""What servers say of their load, as the flat names of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Load = Mapping[str, float]
"""Gauges of one scheduler: names as in SGLang's /v1/loads, those of a section as ``section.name``."""
SUMS = {"running": "num_running_reqs", "queued": "num_waiting_reqs"}
MEANS = {
    "kv_usage": "token_usage",
    "cache_hit_rate": "cache_hit_rate",
    "accept_length": "speculative.accept_length",
    "accept_rate": "speculative.accept_rate",
}
"""The last two are told by servers with speculative decoding only."""
MOMENTS = "decode_moments"
"""Sums over all steps of decoding so far: steps, requests, microseconds, two squares, tokens."""


def flat(load: Mapping[str, Any]) -> Load:
    """The numbers in one answer, those one level deeper included."""
    found: dict[str, float] = {}
    for name, value in load.items():
        if name == MOMENTS and value:
            value = {"seconds": value[2] / 1e6, "tokens": value[5]}
        inner = value if isinstance(value, Mapping) else {"": value}
        for key, number in inner.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                found[f"{name}.{key}" if key else name] = float(number)
    return found


class Speeds:
    """Tokens that each scheduler draws in a second of decoding, between one look and the next.

    Counts are compared, because SGLang's own gauge is 0 whenever a server has nothing to do, as between batches.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], tuple[float, float]] = {}

    def of(self, server: str, loads: Sequence[Load]) -> float:
        """Sum over the server's schedulers since the last call; 0 if nothing was drawn."""
        return sum(self._one((server, place), load) for place, load in enumerate(loads))

    def _one(self, key: tuple[str, int], load: Load) -> float:
        tokens, seconds = load.get(f"{MOMENTS}.tokens", 0.0), load.get(f"{MOMENTS}.seconds", 0.0)
        old_tokens, old_seconds = self._before.get(key, (0.0, 0.0))
        if tokens < old_tokens or seconds < old_seconds:  # the server was started anew
            old_tokens = old_seconds = 0.0
        self._before[key] = tokens, seconds
        return (tokens - old_tokens) / (seconds - old_seconds) if seconds > old_seconds else 0.0


def gauges(loads: Mapping[str, Sequence[Load]], speeds: Speeds) -> dict[str, float]:
    """``engine/...`` out of the loads of each server, by its name: sums over all schedulers, means of fractions.

    The speed is also given for each server. What no scheduler tells is left out.
    """
    every = [load for own in loads.values() for load in own]
    each = {server: speeds.of(server, own) for server, own in loads.items()}
    found = {"engine/tokens_per_s": sum(each.values())}
    found |= {f"engine/{name}": sum(load.get(key, 0.0) for load in every) for name, key in SUMS.items()}
    for name, key in MEANS.items():
        values = [load[key] for load in every if key in load]
        if values:
            found[f"engine/{name}"] = sum(values) / len(values)
    return found | {f"engine/{server}/tokens_per_s": speed for server, speed in each.items()}


def busy(loads: Sequence[Load]) -> float:
    """Requests that run or wait."""
    return sum(load[SUMS["running"]] + load[SUMS["queued"]] for load in loads)
