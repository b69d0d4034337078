"""Sends one policy version from the trainer to the engine and compares both receipts."""

from __future__ import annotations

import time
from dataclasses import replace

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
