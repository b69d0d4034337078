"""Metrics as TensorBoard event files, written with the ``tensorboard`` package alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PrivateAttr

from ..components import Tracker
from ..errors import PluginError
from ..protocols import RunContext
from .journal import read_journal

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard(Tracker):
    """Event files in the run's folder ``tensorboard/``: `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"] = "tensorboard"
    flush_s: float = Field(10.0, gt=0)
    """Longest time that metrics wait in memory."""

    _writer: EventFileWriter | None = PrivateAttr(None)

    async def open(self, context: RunContext) -> None:
        """Start a new event file. In a resumed run it tells readers to forget what is past ``metrics.jsonl``."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise PluginError(
                "trackers: kind 'tensorboard' needs the package tensorboard; pip install 'plasmid[tensorboard]'"
            ) from None
        folder = context.run_dir / "tensorboard"
        resumed = any(folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder), flush_secs=max(1, round(self.flush_s)))
        if resumed:
            last = max((entry.step for entry in read_journal(context.run_dir / "metrics.jsonl")), default=0)
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=last + 1, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            raise ValueError("the tracker is not open")
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    async def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
