"""How runs of every kind begin: a cluster, the parts on it, and Ctrl-C."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...config import RunConfig
from ...protocols import Cluster
from ..checkpoint.run_folder import RunFolder
from ..cluster import open_cluster
from ..cluster.address import address_of
from .startup import Parts, start_parts

T = TypeVar("T")
MakeCluster = Callable[[RunFolder], Cluster]


def interruptible(main: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine on a loop of its own; one that `Interrupts` has cancelled raises `KeyboardInterrupt`."""
    try:
        return asyncio.run(main)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def on_ray(config: RunConfig) -> MakeCluster:
    """Makes a cluster as the recipe says, whose processes log into the run's folder."""

    def make(folder: RunFolder) -> Cluster:
        place = config.placement
        return open_cluster(log_dir=folder.logs, address=address_of(place), wait_s=place.wait_timeout_s)

    return make


async def start_all(
    config: RunConfig,
    folder: RunFolder,
    make_cluster: MakeCluster,
    *,
    with_trainer: bool,
    with_engine: bool,
    is_new: bool,
    evaluating: bool = False,
) -> Parts:
    """Start the parts. A new run that could not start has not taken its folder."""
    try:
        cluster = make_cluster(folder)
        return await start_parts(
            config,
            cluster,
            folder.path,
            with_trainer=with_trainer,
            with_engine=with_engine,
            evaluating=evaluating,
        )
    except BaseException:
        if is_new:
            folder.vacate()
        raise
