"""Metrics of an engine out of the gauges of its servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .dialect import Load


class Speeds:
    """Tokens per second of decoding between one call and the next.

    Computed from counters: a gauge of a server reads 0 whenever it is idle, as between batches.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, int], Load] = {}

    def of(self, server: str, loads: Sequence[Load]) -> float:
        """Sum over the server's schedulers since the last call; 0 if nothing was decoded."""
        return sum(self._one((server, place), load) for place, load in enumerate(loads))

    def _one(self, key: tuple[str, int], load: Load) -> float:
        before = self._before.get(key, Load())
        if load.tokens < before.tokens or load.seconds < before.seconds:  # the server was restarted
            before = Load()
        self._before[key] = load
        seconds = load.seconds - before.seconds
        return (load.tokens - before.tokens) / seconds if seconds > 0 else 0.0


def gauges(loads: Mapping[str, Sequence[Load]], speeds: Speeds) -> dict[str, float]:
    """``engine/...`` metrics from the loads of each server by name: sums over schedulers, means of fractions.

    The speed is also given for each server.
    """
    every = [load for own in loads.values() for load in own]
    each = {server: speeds.of(server, own) for server, own in loads.items()}
    found = {
        "engine/tokens_per_s": sum(each.values()),
        "engine/running": sum(load.running for load in every),
        "engine/queued": sum(load.queued for load in every),
    }
    for name in dict.fromkeys(name for load in every for name in load.fractions):
        values = [load.fractions[name] for load in every if name in load.fractions]
        found[f"engine/{name}"] = sum(values) / len(values)
    return found | {f"engine/{server}/tokens_per_s": speed for server, speed in each.items()}
