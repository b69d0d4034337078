"""TensorBoard tracker, which only needs the ``tensorboard`` package."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from plasmid.components import Tracker
from plasmid.protocols import RunContext
from pydantic import Field, PrivateAttr

from .run_identity import import_package

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard(Tracker):
    """Writes event files to ``tensorboard/`` in the run folder: `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"] = "tensorboard"
    flush_s: float = Field(10.0, gt=0)
    """Maximum time that metrics are buffered in memory, in seconds."""

    _writer: EventFileWriter | None = PrivateAttr(None)
    _resumed: bool = PrivateAttr(False)

    def packages(self) -> Mapping[str, str]:
        return {"tensorboard": "plasmid[tensorboard]"}

    async def open(self, context: RunContext) -> None:
        """Start a new event file. Raises `PluginError` if TensorBoard is not installed."""
        import_package("tensorboard.compat.proto.event_pb2")  # what `log` needs
        writers = import_package("tensorboard.summary.writer.event_file_writer")
        folder = context.run_dir / "tensorboard"
        self._resumed = any(folder.glob("events.out.tfevents.*"))
        self._writer = writers.EventFileWriter(str(folder), flush_secs=max(1, round(self.flush_s)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric. In a resumed run, the first call invalidates later steps of the earlier one."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            raise ValueError("the tracker is not open")
        if self._resumed:
            self._resumed = False
            # an evaluation follows the metrics of its batch, which must remain valid
            first = step + 1 if all(name.startswith("eval/") for name in metrics) else step
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first, session_log=start))
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    async def close(self) -> None:
        """Write buffered metrics."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
