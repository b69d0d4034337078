"""Conversion of checkpoints between layouts, and comparison of two checkpoints."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plasmid.components import Converter, OpenCheckpoint, kind_of
from plasmid.errors import ClusterError, ModelError
from plasmid.utils.safe_files import make_folder, sync_to_disk, sync_tree
from plasmid_models.manifest import check_weights

from .parts import RECORDS, PartFiles, Progress, begin, can_continue, describe_job, has_finished_parts, read_records
from .workers import Conversion, Workers, start_workers

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def stage_folder(target: Path, job: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Yield a new folder next to ``target`` that is renamed to it at the end, or removed after an error.

    With ``job``, a conversion in parts, the folder is kept after an interruption, and a call with the same job yields
    it again. Raises `ModelError` if ``target`` is not empty, if another process writes it,
    or if the disk cannot be written.
    """
    _check_target(target)
    stage = target.with_name(f".{target.name}.partial")
    try:
        make_folder(stage.parent)
        with _lock(stage):
            if job is None or not can_continue(stage, job):
                _clear(stage)
                if job is not None:
                    begin(stage, job)
            yield stage
            shutil.rmtree(stage / RECORDS, ignore_errors=True)
            sync_tree(stage)
            os.replace(stage, target)
            sync_to_disk(target.parent)
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise ModelError(f"{target}: cannot write: {_reason(error)}; the partial output was removed") from error
    except BaseException as error:
        was_interrupted = isinstance(error, KeyboardInterrupt | ClusterError) and has_finished_parts(stage)
        if not (was_interrupted or isinstance(error, _BusyError)):
            shutil.rmtree(stage, ignore_errors=True)
        raise


def _check_target(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target}: already exists; remove it or choose another target")


class _BusyError(ModelError):
    """Another process writes the same target."""


@contextmanager
def _lock(stage: Path) -> Iterator[None]:
    """Create the folder if it is missing, and hold its lock, which is released when the process ends."""
    if stage.is_symlink() or not stage.is_dir():
        stage.unlink(missing_ok=True)
        stage.mkdir()
    handle = os.open(stage, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _BusyError(f"{stage}: another process is writing this conversion; wait until it ends") from None
        yield
    finally:
        os.close(handle)


def _clear(folder: Path) -> None:
    """Remove everything in a folder, left by another conversion."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return (error.strerror or str(error)).lower()


MEASURED = 16
"""Maximum number of differing tensors whose largest difference is computed, which keeps them in memory."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare`."""

    num_equal: int
    differences: tuple[str, ...]
    """One line per tensor that differs or is in one checkpoint only."""


def convert(
    source: Path,
    target: Path,
    *,
    reader: Converter,
    writer: Converter,
    progress: Progress | None = None,
    workers: int = 1,
    plugins: Sequence[Path] = (),
) -> None:
    """Convert ``source`` to another layout, companions included; ``target`` is either complete or absent.

    If both layouts support parts, ``workers`` processes write them, and the next call continues an interrupted
    conversion. ``plugins`` are the plugin files that define the layouts, for these processes. Raises `ModelError`,
    `CheckpointError` if ``source`` is a run's checkpoint that is damaged, and `ClusterError` if a process is killed.
    """
    if not source.exists():
        raise ModelError(f"{source}: no such file or folder")
    _check_target(target)  # before anything large is read
    check_weights(source)
    conversion = Conversion.of(source, reader, writer, plugins, workers)
    # imports, and opening a source with thousands of tensors, take seconds, during which the processes do the same
    modules = {*reader.preloaded, *writer.preloaded}
    with ExitStack() as stack:
        others = stack.enter_context(start_workers(conversion, workers, modules)) if workers > 1 else None
        opened = reader.open_tensors(source)
        job = None if opened is None else describe_job(source, reader, writer, opened)
        with stage_folder(target, job) as stage, stack:  # workers end before the folder is removed or renamed
            if opened is not None:
                _convert_in_parts(source, stage, reader, writer, opened, progress, others)
                return
            _check_workers(others, reader)
            if progress is not None:
                progress.start(None, 0)
            reader.write_companions(source, stage)  # first: some layouts need the config to interpret tensors
            writer.write(stage, _report_progress(reader.read(source), progress))


def _convert_in_parts(
    source: Path,
    stage: Path,
    reader: Converter,
    writer: Converter,
    opened: OpenCheckpoint,
    progress: Progress | None,
    workers: Workers | None,
) -> None:
    names = Counter(info.name for info in opened.tensors)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise ModelError(f"{repeated[0]}: occurs twice in the source")
    if not names:
        raise ModelError("the source has no tensors")
    finished = read_records(stage)
    reader.write_companions(source, stage)
    if workers is not None:
        workers.open(stage)  # opening a target with thousands of tensors takes seconds, too
    parts = writer.open_parts(stage)
    if parts is None:
        _check_workers(workers, writer)
        if progress is not None:
            progress.start(sum(info.num_bytes for info in opened.tensors), 0)
        writer.write(stage, _report_progress(opened.read(names), progress))
        return
    plan = parts.plan(opened.tensors)
    todo = [number for number in range(len(plan)) if number not in finished]
    if progress is not None:
        sizes = [sum(info.num_bytes for info in part) for part in plan]
        progress.start(sum(sizes), sum(sizes[number] for number in finished))
    if workers is not None and len(todo) > 1:
        finished |= workers.write(todo, progress)
    else:
        advance = _ignore if progress is None else progress.advance
        finished |= PartFiles(stage, plan, opened=opened, writer=parts, advance=advance).write(todo)
    parts.join([finished[number] for number in range(len(plan))])


def _ignore(name: str, num_bytes: int) -> None:
    """Report nothing."""


def _check_workers(workers: Workers | None, layout: Converter) -> None:
    if workers is not None:
        raise ModelError(
            f"--workers: must be 1 for layout {kind_of(layout)}, which cannot be processed in parts, "
            f"got {workers.count}"
        )


def compare(left: Path, right: Path, *, left_reader: Converter, right_reader: Converter) -> Comparison:
    """Compare two checkpoints tensor by tensor: names, dtypes, shapes and bits. Keeps few tensors in memory.

    Raises `ModelError`, and `CheckpointError` if one is a run's checkpoint that is damaged.
    """
    for path in (left, right):
        check_weights(path)
    ours, theirs = (
        {name: _describe(t) for name, t in r.read(p)} for r, p in ((left_reader, left), (right_reader, right))
    )
    differing = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    values = [name for name in differing if ours[name][:-1] == theirs[name][:-1]]
    gaps = _gaps(left_reader.read(left), right_reader.read(right), set(values[:MEASURED]))
    lines = [f"{name}: only in {left}" for name in ours if name not in theirs]
    lines += [f"{name}: only in {right}" for name in theirs if name not in ours]
    for name in differing:
        if name in values:
            lines.append(f"{name}: values differ" + (f" by up to {gaps[name]:.6g}" if name in gaps else ""))
        else:
            lines.append(f"{name}: {_format_tensor(ours[name])} and {_format_tensor(theirs[name])}")
    return Comparison(sum(ours[name] == theirs.get(name) for name in ours), tuple(lines))


def verify_sha256(path: Path, expected: str) -> None:
    """Raise `ModelError` if the file's SHA-256 digest is not ``expected``."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot read: {(error.strerror or str(error)).lower()}") from None
    if found != expected.strip().lower():
        raise ModelError(f"{path}: has sha256 {found}, expected {expected}; the file is corrupt or a different one")


def _report_progress(tensors: Iterable[tuple[str, Tensor]], progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        if progress is not None:
            progress.advance(name, tensor.nbytes)


def _describe(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    import torch

    digest = hashlib.sha256()
    if tensor.numel():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest.hexdigest()


def _format_tensor(description: tuple[str, tuple[int, ...], str]) -> str:
    return f"{description[0]} {list(description[1])}"


def _gaps(left: Iterable[tuple[str, Tensor]], right: Iterable[tuple[str, Tensor]], names: set[str]) -> dict[str, float]:
    if not names:
        return {}
    held = {name: tensor for name, tensor in left if name in names}
    return {name: float((tensor.double() - held[name].double()).abs().max()) for name, tensor in right if name in names}
