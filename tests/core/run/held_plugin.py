"""A plugin whose trainer writes checkpoints in the background, and delays them as configured."""

import asyncio
import os
import signal
from typing import Literal

from plasmid import Tracker, TrainerConfig, hookimpl
from plasmid.errors import CheckpointError, EngineError
from plasmid.testing.fakes import FakeTrainer
from pydantic import Field

TRAINED = []
"""Steps that were trained; the tracker below returns this list itself as its state."""


class HeldTrainerConfig(TrainerConfig):
    """The fake trainer with saves that finish later."""

    kind: Literal["held"] = "held"
    held: tuple[int, ...] = ()
    """Steps whose checkpoint is written only after the next step has been trained."""
    failing: tuple[int, ...] = ()
    """Steps whose checkpoint fails to be written the first time, which is noticed at the end of the save."""
    breaks_at: int = 0
    """Step whose training fails the first time; 0 for none."""
    signals: dict[str, int] = Field(default_factory=dict)
    """Signals that the process sends itself the first time after a step, by step."""

    async def build(self, context):
        return HeldTrainer(self, context.run_dir)


class HeldTrainer(FakeTrainer):
    """Counts the checkpoints being written: never more than one."""

    def __init__(self, settings, run_dir):
        super().__init__()
        self.settings, self.run_dir, self.writing, self.advanced = settings, run_dir, 0, asyncio.Event()
        TRAINED.clear()

    def first(self, what):
        """Return True the first time in a run and all its resumes."""
        if (self.run_dir / what).exists():
            return False
        (self.run_dir / what).touch()
        return True

    async def train(self, batch, scores):
        report = await super().train(batch, scores)
        TRAINED.append(self.step)
        for name, step in self.settings.signals.items():
            if step == self.step and self.first(name):
                os.kill(os.getpid(), getattr(signal, name))
        self.advanced.set()
        if self.step == self.settings.breaks_at and self.first("broken"):
            raise EngineError("it broke")
        return report

    async def save(self, path):
        assert not self.writing, "one checkpoint at a time"
        self.writing, self._write_s = 1, 0.02
        self.advanced.clear()
        step, write = self.step, await super().save(path)

        async def finish():
            if step in self.settings.held:
                await self.advanced.wait()
            if step in self.settings.failing and self.first("failed"):
                raise CheckpointError(f"{path}: no room")
            await write()
            self.writing = 0

        return finish

    async def load(self, path):
        await super().load(path)
        TRAINED[:] = range(1, self.step + 1)


class Remembering(Tracker):
    """Its state is a list that keeps growing."""

    kind: Literal["remembering"] = "remembering"

    def log(self, step, metrics):
        return None

    def state(self):
        return {"trained": TRAINED}


@hookimpl
def register_components():
    return [HeldTrainerConfig, Remembering]
