"""Moving a policy version from the trainer to the engine, and not going on before both agree on what was moved."""

from __future__ import annotations

import asyncio
import time

from ..errors import DeadlineError
from ..protocols import RolloutEngine, SyncPlan, Trainer
from ..receipts import compare
from ..types import SyncReceipt


async def publish(trainer: Trainer, engine: RolloutEngine, *, version: int, timeout_s: float) -> SyncReceipt:
    """Send and receive one version together, compare both receipts, let the engine go on.

    The engine stays paused if anything fails: it may hold half of the new weights. Raises `SyncError` if the receipts
    differ, `DeadlineError` if the two do not finish in time.
    """
    started = time.monotonic()
    await engine.pause(engine.pause_mode)
    plan = await engine.plan_sync()
    try:
        async with asyncio.timeout(timeout_s):
            sent, received = await _both(trainer, engine, plan, version)
    except TimeoutError:
        raise DeadlineError(
            f"weight sync of version {version}: no end within run.sync_timeout_s = {timeout_s:g}"
        ) from None
    compare(sent, received)
    await engine.resume()
    return SyncReceipt(
        version=version,
        num_tensors=sent.num_tensors,
        buckets=sent.buckets,
        seconds=time.monotonic() - started,
    )


async def _both(
    trainer: Trainer, engine: RolloutEngine, plan: SyncPlan, version: int
) -> tuple[SyncReceipt, SyncReceipt]:
    try:
        async with asyncio.TaskGroup() as tasks:
            sent = tasks.create_task(trainer.send(plan, version))
            received = tasks.create_task(engine.receive(plan, version))
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return sent.result(), received.result()
