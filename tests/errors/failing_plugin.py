"""A plugin whose components fail as configured."""

import asyncio
import time
from pathlib import Path
from typing import Literal

from plasmid import Filter, Reward, TrainerConfig, hookimpl
from plasmid.testing.fakes import FakeTrainer

SAVED_BYTES = 40_000


class BadReward(Reward):
    """Gives 1.0 until a certain group, then fails."""

    kind: Literal["bad"] = "bad"
    how: Literal["raise", "wait", "block", "none", "nan", "text"] = "raise"
    """How it fails."""
    from_group: int = 0
    """First group for which it fails."""

    async def __call__(self, prompt, sample):
        if sample.group_id < self.from_group:
            return 1.0
        if self.how == "raise":
            raise RuntimeError("answer\n  is not there")
        if self.how == "wait":
            Path("waiting").touch()
            await asyncio.sleep(3600)
        if self.how == "block":
            time.sleep(0.5)
        return {"none": None, "nan": float("nan"), "text": "1.0"}.get(self.how, 1.0)


class ShortReward(Reward):
    """Scores groups, and omits a sample."""

    kind: Literal["short"] = "short"

    async def __call__(self, prompt, sample):
        return 1.0

    async def score_group(self, prompt, samples):
        return [1.0] * (len(samples) - 1)


class BadFilter(Filter):
    """Raises, or drops everything."""

    kind: Literal["bad"] = "bad"
    how: Literal["raise", "drop"] = "raise"
    """How it fails."""

    def __call__(self, group):
        if self.how == "raise":
            raise ZeroDivisionError("no spread")
        return False


class GrowingTrainer(FakeTrainer):
    """Its state grows with every step."""

    async def save(self, path: Path) -> None:
        await super().save(path)
        (path / "weights.bin").write_bytes(b"w" * SAVED_BYTES * self.step)

    async def export(self, path: Path) -> None:
        if self.export_s:
            Path("waiting").touch()
            await asyncio.sleep(self.export_s)
        await super().export(path)


class Growing(TrainerConfig):
    """Builds the trainer above."""

    kind: Literal["growing"] = "growing"
    export_s: float = 0.0
    """Duration of an export, in seconds."""
    start_s: float = 0.0
    """Duration of a start, in seconds."""

    async def build(self, context):
        if self.start_s:
            Path("waiting").touch()
            await asyncio.sleep(self.start_s)
        trainer = GrowingTrainer()
        trainer.export_s = self.export_s
        return trainer


@hookimpl
def register_components():
    return [Growing, BadReward, ShortReward, BadFilter]
