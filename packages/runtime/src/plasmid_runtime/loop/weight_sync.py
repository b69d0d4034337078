"""Moving a policy version from the trainer to the engine, and not going on before both agree on what was moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from plasmid.protocols import RolloutEngine, Trainer
from plasmid.types import SyncReceipt
from plasmid.types.receipts import compare
from plasmid.utils.waiting import together, within


async def transfer(trainer: Trainer, engine: RolloutEngine, *, version: int, timeout_s: float) -> SyncReceipt:
    """Send and receive one version together and compare both receipts. The engine must be paused, and still is then.

    Raises `SyncError` if the receipts differ, `DeadlineError` if the two do not finish in time.
    """
    started = time.monotonic()
    sent, received = await within(
        timeout_s, f"weight sync of version {version} (run.sync_timeout_s)", _both(trainer, engine, version)
    )
    compare(sent, received)
    phases = {**sent.phases, **received.phases}
    return replace(sent, version=version, seconds=time.monotonic() - started, phases=phases)


async def _both(trainer: Trainer, engine: RolloutEngine, version: int) -> list[SyncReceipt]:
    plan = await engine.plan_sync()
    # both at once: a broadcast needs the two sides, and shared memory must not outlive its tensor
    return await together([trainer.send(plan, version), engine.receive(plan, version)])


LOOK_S = 1.0
"""Between two looks at the engine."""


async def wait_mending(
    work: set[asyncio.Future[Any]], engine: RolloutEngine | None, mend: Callable[[], Awaitable[None]]
) -> None:
    """Wait for the first of ``work``; the trainer is idle meanwhile. Raises `EngineError` when too little is left."""
    while True:
        timeout = None if engine is None else LOOK_S
        done, _ = await asyncio.wait(work, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return
        assert engine is not None
        if engine.needs_weights():
            await mend()
