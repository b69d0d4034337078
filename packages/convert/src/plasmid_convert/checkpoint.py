"""From one layout to another, and whether two checkpoints hold the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plasmid.components import Converter
from plasmid.errors import ModelError

from .staging import staged

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[str, int], None]
"""Told the name and size in bytes of every tensor that has been read."""
MEASURED = 16
"""Differing tensors whose distance is worked out; they are held in memory."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found."""

    num_equal: int
    differences: tuple[str, ...]
    """One line for each tensor that is not the same in both."""


def convert(
    source: Path, target: Path, *, reader: Converter, writer: Converter, progress: Progress | None = None
) -> None:
    """Write ``source`` in another layout, companions included; the target is complete or absent.

    Raises `ModelError`.
    """
    if not source.exists():
        raise ModelError(f"{source}: no such file or folder")
    with staged(target) as stage:
        reader.write_companions(source, stage)  # first: some layouts need the config to know what tensors mean
        writer.write(stage, _report_progress(reader.read(source), progress))


def compare(left: Path, right: Path, *, left_reader: Converter, right_reader: Converter) -> Comparison:
    """Compare two checkpoints tensor by tensor, bit by bit: names, types, shapes, values. Holds few in memory."""
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
            lines.append(f"{name}: {_shown(ours[name])} and {_shown(theirs[name])}")
    return Comparison(sum(ours[name] == theirs.get(name) for name in ours), tuple(lines))


def verify_sha256(path: Path, expected: str) -> None:
    """Raise `ModelError` if the file has another SHA-256 digest."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path}: cannot read: {(error.strerror or str(error)).lower()}") from None
    if found != expected.strip().lower():
        raise ModelError(f"{path}: has sha256 {found}, expected {expected}; the file is damaged or another one")


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


def _shown(described: tuple[str, tuple[int, ...], str]) -> str:
    return f"{described[0]} {list(described[1])}"


def _gaps(left: Iterable[tuple[str, Tensor]], right: Iterable[tuple[str, Tensor]], names: set[str]) -> dict[str, float]:
    if not names:
        return {}
    held = {name: tensor for name, tensor in left if name in names}
    return {name: float((tensor.double() - held[name].double()).abs().max()) for name, tensor in right if name in names}
