"""Training values of each token of a batch, in one file per trainer rank (``run.token_values_every``)."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..utils.safe_files import replace_file
from .samples import Floats

FOLDER = "tokens"
"""Subfolder of the run folder."""
COLUMNS = ("advantage", "ratio", "clipped", "logprob")
"""Values of a token. ``ratio`` is the probability by the current policy divided by that of the old policy, ``clipped``
is 1 if clipping removed the gradient, ``logprob`` is the trainer's. All are 0 on tokens outside the loss."""


def token_values_file(run_dir: Path, batch: int, rank: int) -> Path:
    """Return the file in which a trainer rank stores the values of a batch, counted from 1."""
    return run_dir / FOLDER / f"batch-{batch:06d}-trainer-{rank}.npz"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """Values of the T tokens of n samples; sample i has the tokens ``offsets[i]:offsets[i + 1]``."""

    sample_ids: tuple[str, ...]
    offsets: NDArray[np.int64]
    """[n + 1]"""
    columns: Mapping[str, Floats]
    """[T] each, by a name of `COLUMNS`."""

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            ids: NDArray[Any] = np.array(self.sample_ids, np.str_)
            np.savez(file, allow_pickle=False, sample_ids=ids, offsets=self.offsets, **self.columns)

    @staticmethod
    def read(path: Path) -> TokenValues:
        """Read a file of `write`, safely: without pickles or compressed data. Raises `CheckpointError`."""
        try:
            with zipfile.ZipFile(path) as archive:
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                    raise ValueError("it is compressed")
            with np.load(path, allow_pickle=False) as found:
                ids, offsets = found["sample_ids"], found["offsets"]
                columns = {name: found[name].astype(np.float32) for name in COLUMNS if name in found}
        except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{path}: not a file of token values: {str(error).splitlines()[0]}") from None
        whole = ids.ndim == offsets.ndim == 1 and ids.dtype.kind == "U" and offsets.dtype == np.int64
        if not whole or len(offsets) != len(ids) + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise CheckpointError(f"{path}: not a file of token values: its offsets do not fit its samples")
        if any(column.shape != (offsets[-1],) for column in columns.values()):
            raise CheckpointError(f"{path}: not a file of token values: a column has another length than the tokens")
        return TokenValues(sample_ids=tuple(map(str, ids)), offsets=offsets, columns=columns)

    def by_sample(self) -> dict[str, dict[str, Floats]]:
        """Return the columns [L] of each sample, by sample id."""
        return {
            id_: {name: column[self.offsets[i] : self.offsets[i + 1]] for name, column in self.columns.items()}
            for i, id_ in enumerate(self.sample_ids)
        }


def read_token_values(run_dir: Path, batch: int) -> dict[str, dict[str, Floats]]:
    """Read the values of a batch, by sample and column; empty if none are stored.

    If several files contain a sample, the newest is used: a resumed run may have a different number of ranks. Raises
    `CheckpointError`.
    """
    files = (run_dir / FOLDER).glob(f"batch-{batch:06d}-trainer-*.npz")
    found: dict[str, dict[str, Floats]] = {}
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name)):
        found |= TokenValues.read(file).by_sample()
    return found
