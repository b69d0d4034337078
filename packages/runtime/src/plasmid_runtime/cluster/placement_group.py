"""Waits until a cluster has what a run needs, and says what it waits for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import ray
from plasmid.errors import DeadlineError
from plasmid.protocols import Share
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

log = logging.getLogger(__name__)
POLL_S = 1.0
LOG_INTERVAL_S = 30.0
"""Seconds between two messages."""


async def wait_for_placement_group(shares: Sequence[Share], *, within_s: float) -> PlacementGroup:
    """One placement group with a bundle for each share, each on a machine of its own. Raises `DeadlineError`."""
    bundles = [{"CPU": share.cpus, **({"GPU": share.gpus} if share.gpus else {})} for share in shares]
    group: PlacementGroup = placement_group(bundles, strategy="STRICT_SPREAD")
    begun = time.monotonic()
    logged = begun - LOG_INTERVAL_S
    try:
        while not await asyncio.to_thread(group.wait, POLL_S):
            now = time.monotonic()
            if now - begun > within_s:
                raise DeadlineError(
                    f"placement: the Ray cluster could not give the run what it needs within {within_s:g} s "
                    f"(placement.wait_timeout_s): {describe_request(shares)}; it has {describe_cluster()}; "
                    "add machines, wait until others have ended, or set fewer nodes or ranks"
                )
            if now - logged > LOG_INTERVAL_S:
                logged = now
                log.warning(
                    "waiting for the Ray cluster to have %s; it has %s", describe_request(shares), describe_cluster()
                )
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def bundle_addresses(group: PlacementGroup) -> list[str]:
    """The machine of each bundle."""
    known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [known[nodes[index]] for index in sorted(nodes)]


def describe_request(shares: Sequence[Share]) -> str:
    """In words: ``2 machines with 4 GPUs and 5 CPUs each``."""
    found = []
    for share in dict.fromkeys(shares):
        count = sum(one == share for one in shares)
        what = _amounts(share.gpus, share.cpus)
        found.append(f"{count} machines with {what} each" if count > 1 else f"1 machine with {what}")
    return ", ".join(found)


def describe_cluster() -> str:
    """The machines of the cluster in words, and what is free on all of them together."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    each = sorted(f"{n['NodeManagerAddress']} with {_amounts(*_numbers(n['Resources']))}" for n in nodes)
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{', '.join(each) or 'no machine'}, of which are free {_amounts(*_numbers(free))}"


def _numbers(resources: dict[str, float]) -> tuple[float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0)


def _amounts(gpus: float, cpus: float) -> str:
    parts = [f"{gpus:g} GPU{'' if gpus == 1 else 's'}"] if gpus else []
    return " and ".join([*parts, f"{cpus:g} CPU{'' if cpus == 1 else 's'}"])
