"""Processes that write the parts of a conversion."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from plasmid.components import Converter, kind_of
from plasmid.errors import ClusterError, PlasmidError
from plasmid.plugins.registry import converters, load_plugins

from .parts import PartFiles, Progress

PRELOADED = f"{__package__}.preloaded"
"""What every process imports. Imported only once, by the process from which the others are forked."""
START_S = 1.0
"""Maximum time to wait at the end for processes that are being started, in seconds."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A converter that another process can create."""

    kind: str
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, converter: Converter) -> Layout:
        """Return the layout of a converter."""
        return cls(kind_of(converter), converter.model_dump(mode="json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Start-up arguments of each process of a conversion."""

    source: Path
    reader: Layout
    writer: Layout
    plugins: tuple[Path, ...]
    threads: int
    """Number of threads of torch in each process."""

    @classmethod
    def of(
        cls, source: Path, reader: Converter, writer: Converter, plugins: Sequence[Path], workers: int
    ) -> Conversion:
        """Describe a conversion for ``workers`` processes."""
        return cls(
            source=source,
            reader=Layout.of(reader),
            writer=Layout.of(writer),
            plugins=tuple(plugins),
            threads=max(1, (os.cpu_count() or 1) // workers),
        )


class Workers:
    """Running processes of a conversion. They import modules and open the source as soon as they are started."""

    def __init__(self, processes: Mapping[Connection, BaseProcess]) -> None:
        self._processes = processes

    @property
    def count(self) -> int:
        """Number of processes."""
        return len(self._processes)

    def open(self, stage: Path) -> None:
        """Make all processes open the output folder ``stage``, which must already contain the companion files."""
        for connection in self._processes:
            with suppress(BrokenPipeError, ConnectionResetError):  # the next message says why it has ended
                connection.send(stage)

    def write(self, todo: Sequence[int], progress: Progress | None) -> dict[int, dict[str, Any]]:
        """Write the parts ``todo`` to the folder passed to `open`. Returns the record of each part by number.

        Raises `ModelError`, `OSError`, and `ClusterError` if a process is killed.
        """
        waiting = list(reversed(todo))
        records: dict[int, dict[str, Any]] = {}
        while len(records) < len(todo):
            for connection in cast(list[Connection], wait(list(self._processes))):
                try:
                    what, first, second = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise _describe_end(self._processes[connection]) from None
                if what == "error":
                    raise first
                if what == "bytes":
                    if progress is not None:
                        progress.advance(first, second)
                    continue
                if what == "next":
                    connection.send(waiting.pop() if waiting else None)
                    continue
                records[first] = second
        return records


@contextmanager
def start_workers(conversion: Conversion, count: int, preloaded: Collection[str] = ()) -> Iterator[Workers]:
    """Start processes, without waiting until they run. None is left running at the end of the block.

    The modules ``preloaded``, which may take seconds, are imported once for all of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED, *sorted(preloaded)])
    pipes = [context.Pipe() for _ in range(count)]
    start = _Start([(context.Process(target=_work, args=(conversion, end), daemon=True), end) for _, end in pipes])
    start.begin()
    try:
        yield Workers({ours: process for (ours, _), process in zip(pipes, start.processes, strict=True)})
    finally:
        start.end()


class _Start:
    """Starts processes in a thread, because a start waits until the server that forks them has imported everything."""

    def __init__(self, wanted: Sequence[tuple[BaseProcess, Connection]]) -> None:
        self._wanted, self._is_over = wanted, False
        self._thread = threading.Thread(target=self._start_all, daemon=True)

    @property
    def processes(self) -> list[BaseProcess]:
        """Return all processes."""
        return [process for process, _ in self._wanted]

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _start_all(self) -> None:
        try:
            resource_tracker.ensure_running()  # otherwise a start would do it, which unblocks the signal
            # the server inherits this; Ctrl-C in a terminal would end it with a traceback
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            for process in self.processes:
                if not self._is_over:
                    process.start()
        except (OSError, EOFError):
            pass  # the server has ended: `Workers.write` reports the closed pipes
        finally:
            for _, end in self._wanted:
                end.close()
            if self._is_over:
                self._kill()

    def end(self) -> None:
        """Kill all processes. Those that start later, after their server has imported everything, are killed then."""
        self._is_over = True
        self._kill()
        self._thread.join(START_S)

    def _kill(self) -> None:
        running = [process for process in self.processes if process.pid is not None]
        for process in running:
            process.kill()
        for process in running:
            process.join()


def _describe_end(process: BaseProcess) -> ClusterError:
    if process.pid is None:
        how = "could not be started"
    else:
        process.join(5)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return ClusterError(
        f"--workers: a process {how}, perhaps because memory ran out; finished files are kept: repeat the command, "
        "with fewer workers"
    )


def _work(conversion: Conversion, connection: Connection) -> None:
    """Write the parts whose numbers arrive, in a separate process, until the main process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main process ends this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(conversion.threads)
    try:
        layouts = converters(load_plugins(files=conversion.plugins))
        reader, writer = (
            layouts[one.kind].model_validate(one.settings) for one in (conversion.reader, conversion.writer)
        )
        opened = reader.open_tensors(conversion.source)
        stage = connection.recv()
        parts = writer.open_parts(stage)
        if opened is None or parts is None:
            return  # a layout without parts, which the main process refuses
        plan = parts.plan(opened.tensors)

        def advance(name: str, num_bytes: int) -> None:
            connection.send(("bytes", name, num_bytes))

        files = PartFiles(stage, plan, opened=opened, writer=parts, advance=advance)
        for number, record in files.write(_receive_numbers(connection)):
            connection.send(("done", number, record))
        connection.recv()  # the main process ends this one
    except EOFError:
        return
    except (PlasmidError, OSError) as error:
        connection.send(("error", error, None))
    except Exception:  # noqa: BLE001 - boundary: the main process raises it
        connection.send(("error", RuntimeError(traceback.format_exc()), None))


def _receive_numbers(connection: Connection) -> Iterator[int]:
    """Ask for the numbers of parts one by one until there are no more."""
    while True:
        connection.send(("next", None, None))
        number = connection.recv()
        if number is None:
            return
        yield number


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
