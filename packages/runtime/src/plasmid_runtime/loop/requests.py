"""Requests to a running loop: pause, resume, checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True, eq=False)
class LoopRequests:
    """Requests that the loop handles between two batches. Call all methods in the loop's thread."""

    is_paused: bool = False
    """True if no further batch may start; checkpoints and the end of the run are still possible."""
    is_waiting: bool = False
    """True while the loop waits between two batches because it is paused."""
    wants_checkpoint: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every request, cleared by the loop."""

    def pause(self) -> None:
        """Start no further batch until `resume`."""
        self.is_paused = True
        self.changed.set()

    def resume(self) -> None:
        """Undo `pause`."""
        self.is_paused = False
        self.changed.set()

    def checkpoint(self) -> None:
        """Request a checkpoint after the current batch, or immediately if there is none."""
        self.wants_checkpoint = True
        self.changed.set()
