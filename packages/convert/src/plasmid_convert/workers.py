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
"""Module with the imports of every worker. The fork server imports it before it forks them."""
START_S = 1.0
"""Maximum time to wait for the thread that starts workers when a conversion ends, in seconds."""


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
        """Make all workers open the output folder ``stage``, which must already contain the companion files."""
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
    """Start worker processes in the background, and kill them when the block ends.

    The fork server imports the modules ``preloaded`` once, before it forks the first worker.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED, *sorted(preloaded)])
    pipes = [context.Pipe() for _ in range(count)]
    ends = [end for _, end in pipes]
    processes = [context.Process(target=_work, args=(conversion, end), daemon=True) for end in ends]
    is_over = threading.Event()
    thread = threading.Thread(target=_start_all, args=(processes, ends, is_over), daemon=True)
    thread.start()
    try:
        yield Workers({ours: process for (ours, _), process in zip(pipes, processes, strict=True)})
    finally:
        is_over.set()
        _kill(processes)
        thread.join(START_S)


def _start_all(processes: Sequence[BaseProcess], ends: Sequence[Connection], is_over: threading.Event) -> None:
    """Start the processes. `Process.start` blocks until the fork server has imported all preloaded modules."""
    try:
        resource_tracker.ensure_running()  # `Process.start` would otherwise start it, and unblock SIGINT
        # inherited by the fork server, which Ctrl-C during its imports would otherwise end with a traceback
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for process in processes:
            if not is_over.is_set():
                process.start()
    except (OSError, EOFError):
        pass  # the fork server has ended: `Workers.write` reports the closed pipes
    finally:
        for end in ends:
            end.close()
        if is_over.is_set():
            _kill(processes)


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kill the processes that have been started, and wait for their ends."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
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
