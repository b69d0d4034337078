"""Conversion of checkpoints between layouts, and comparison of two checkpoints."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.components import Converter
from plasmid.errors import ModelError
from plasmid.utils.safe_files import make_folder, sync_to_disk, sync_tree
from plasmid_models.manifest import check_weights

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def stage_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target`` that is renamed to it at the end, or removed after an error.

    Raises `ModelError` if ``target`` is not empty or the disk cannot be written.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ModelError(f"{target}: exists already; remove it or choose another target")
    stage = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(stage, ignore_errors=True)  # left by an interrupted conversion
        make_folder(stage.parent)
        stage.mkdir()
        yield stage
        sync_tree(stage)
        os.replace(stage, target)
        sync_to_disk(target.parent)
    except OSError as error:
        shutil.rmtree(stage, ignore_errors=True)
        raise ModelError(f"{target}: cannot write: {_reason(error)}; the partial output was removed") from error
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return (error.strerror or str(error)).lower()


Progress = Callable[[str, int], None]
"""Called with the name and size in bytes of each tensor that has been read."""
MEASURED = 16
"""Maximum number of differing tensors whose largest difference is computed, which keeps them in memory."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `compare`."""

    num_equal: int
    differences: tuple[str, ...]
    """One line per tensor that differs or is in one checkpoint only."""


def convert(
    source: Path, target: Path, *, reader: Converter, writer: Converter, progress: Progress | None = None
) -> None:
    """Convert ``source`` to another layout, companions included; ``target`` is either complete or absent.

    Raises `ModelError`, and `CheckpointError` if ``source`` is a run's checkpoint that is damaged.
    """
    if not source.exists():
        raise ModelError(f"{source}: no such file or folder")
    check_weights(source)
    with stage_folder(target) as stage:
        reader.write_companions(source, stage)  # first: some layouts need the config to interpret tensors
        writer.write(stage, _report_progress(reader.read(source), progress))


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
        raise ModelError(f"{path}: has sha256 {found}, expected {expected}; the file is corrupt or another one")


def _report_progress(tensors: Iterable[tuple[str, Tensor]], progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        if progress:
            progress(name, tensor.numel() * tensor.element_size())


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
