"""Processes that write the parts of a conversion."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

from plasmid.errors import ClusterError, PlasmidError

from .parts import PartFiles, Progress


def write_in_workers(
    files: PartFiles, todo: Sequence[int], *, workers: int, progress: Progress | None
) -> dict[int, dict[str, Any]]:
    """Write the parts ``todo`` with several processes and return their records by number.

    Raises `ModelError`, `OSError`, and `ClusterError` if a process is killed. No process is left running.
    """
    waiting = list(reversed(todo))
    records: dict[int, dict[str, Any]] = {}
    with _start(files, min(workers, len(todo))) as processes:
        while len(records) < len(todo):
            for connection in cast(list[Connection], wait(list(processes))):
                try:
                    what, first, second = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise _describe_end(processes[connection]) from None
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
def _start(files: PartFiles, count: int) -> Iterator[dict[Connection, BaseProcess]]:
    """Fork the processes: imports, and opening a source with thousands of tensors, can take each of them 10 s."""
    context = multiprocessing.get_context("fork")
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(files, theirs), daemon=True)
            process.start()
            theirs.close()
            processes[ours] = process
        yield processes
    finally:
        for started in processes.values():
            started.kill()
        for started in processes.values():
            started.join()


def _describe_end(process: BaseProcess) -> ClusterError:
    process.join(5)
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return ClusterError(
        f"--workers: a process {how}, perhaps because memory ran out; finished files are kept: repeat the command, "
        "with fewer workers"
    )


def _work(files: PartFiles, connection: Connection) -> None:
    """Write the parts whose numbers arrive, in a separate process, until the main process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main process ends this one
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)  # the threads of a parent do not exist in a fork

    def advance(name: str, num_bytes: int) -> None:
        connection.send(("bytes", name, num_bytes))

    try:
        for number, record in files.write(_receive_numbers(connection), advance):
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
