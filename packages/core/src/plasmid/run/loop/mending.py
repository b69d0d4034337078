"""What happens to an engine while the loop waits for it: what was started anew gets the weights that it lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ...protocols import RolloutEngine

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
