"""The log of a run's driver, ``logs/driver.log``: a copy of what a command or a program prints about the run."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid.utils.printable import escape_unprintable
from plasmid.utils.safe_files import append_to

from .progress import RunState, StreamProgress

FILE = "driver.log"


class Transcript(io.TextIOBase):
    """A text stream that prefixes each line with the time, and buffers lines until the run folder is known.

    It receives the folder as an observer of the run. Text that cannot be written is lost, since a full disk must not
    end a command that only prints.
    """

    def __init__(self) -> None:
        self._file: IO[Any] | None = None
        self._early: list[str] = []
        self._rest = ""
        self._lock = threading.Lock()

    def run_started(self, run_dir: Path) -> None:
        """Write the buffered output, and all later output, into the log of this run."""
        with self._lock:
            try:
                self._file = append_to(run_dir / "logs" / FILE, encoding="utf-8", buffering=1)
            except OSError:
                return
            early, self._early = self._early, []
            self._append("".join(early))

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write the text, line by line. Returns the number of characters given."""
        with self._lock:
            *lines, self._rest = (self._rest + escape_unprintable(text)).split("\n")
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            self._append("".join(f"{now} {line.rstrip()}\n" for line in lines if line.strip()))
        return len(text)

    def close(self) -> None:
        """Write the remaining output and close the log. Output without a run is discarded."""
        if self._rest:
            self.write("\n")
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):  # buffered text may not fit either
                    self._file.close()
            self._file, self._early = None, []
        super().close()

    def _append(self, text: str) -> None:
        if self._file is None:
            self._early.append(text)
            return
        try:
            self._file.write(text)
        except OSError:
            return


class DriverLog:
    """A context that writes the driver's log of a run started by a program: progress, log messages, and the error.

    ``observers`` receive the run's events. If one of them is a `Transcript`, as for the `rl` command, it already writes
    the log, and this context adds nothing.
    """

    def __init__(self, config: RunConfig, observers: Sequence[object]) -> None:
        self._log = None if any(isinstance(one, Transcript) for one in observers) else Transcript()
        own = [] if self._log is None else [self._log, StreamProgress(RunState(config), self._log)]
        self.observers = (*observers, *own)
        self._handlers: list[logging.Handler] = []

    def __enter__(self) -> Self:
        root = logging.getLogger()
        if self._log is not None:
            handler = logging.StreamHandler(self._log)
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            # in a program without logging handlers, `lastResort` prints warnings; adding ours alone would disable it
            self._handlers = [handler] if root.handlers or logging.lastResort is None else [handler, logging.lastResort]
        for one in self._handlers:
            root.addHandler(one)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for one in self._handlers:
            logging.getLogger().removeHandler(one)
        if error is not None:
            self.write_error(error)
        if self._log is not None:
            self._log.close()

    def write_error(self, error: BaseException) -> None:
        """Write the error that ends the run: one line, or a traceback if it is not a `PlasmidError`."""
        if self._log is not None:
            known = isinstance(error, PlasmidError)
            self._log.write(f"error: {error}\n" if known else "".join(traceback.format_exception(error)))
