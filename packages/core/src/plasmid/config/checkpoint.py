"""``[checkpoint]``: what a run saves, and where it starts from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from ..components import Settings
from ..settings.trust import INERT


class CheckpointConfig(Settings):
    """``[checkpoint]``: what is saved, and where the run starts from."""

    every: int = Field(0, ge=0)
    """Batches between two checkpoints; 0 saves at the end (and on Ctrl-C) only."""
    at_end: bool = True
    """Save after the last batch."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_every: int = Field(0, ge=0)
    """Keep every checkpoint whose batch is a multiple of this for good; 0 keeps none."""
    start_from: Annotated[str, INERT] = "none"
    """Checkpoint of another run to start the policy and its optimizer from; ``none`` is the model folder."""
    export: bool = True
    """Write a Hugging Face folder of the final policy."""

    def misfits(self) -> Iterator[str]:
        yield from super().misfits()
        if self.keep_every and self.every == 0:
            yield f"keep_every = {self.keep_every} is never read with every = 0, which saves at the end only; remove it"
        elif self.keep_every and self.keep_every % self.every:
            yield f"keep_every = {self.keep_every} is no multiple of every = {self.every}, so most would not be there"
