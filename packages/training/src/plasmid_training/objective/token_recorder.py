"""Recording of per-token values in training, for `TokenValues` files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from plasmid.types.batch import Rows
from plasmid.types.token_values import TokenValues
from torch import Tensor

from ..batches.collate import Microbatch

log = logging.getLogger(__name__)
NAMES = {"advantage_mean": "advantage", "ratio_mean": "ratio", "clip_fraction": "clipped"}
"""Column of each recorded metric of an algorithm; metrics that the algorithm does not report have no column."""


class TokenRecorder:
    """Values [T] of one rank's tokens, collected from its microbatches; 0 outside of the loss mask."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._columns: dict[str, Tensor] = {}

    def add(self, microbatch: Microbatch, logprobs: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Record the values of a microbatch's loss tokens [P]."""
        found = {column: metrics[name] for name, column in NAMES.items() if name in metrics} | {"logprob": logprobs}
        place = microbatch.token_index.cpu()
        for column, values in found.items():
            kept = self._columns.setdefault(column, torch.zeros(len(self._rows.token_ids)))
            kept[place] = values.detach().float().cpu()

    def write(self, path: Path) -> None:
        """Write the file. Errors are logged and do not end the run."""
        columns = {name: values.numpy() for name, values in self._columns.items()}
        try:
            TokenValues(sample_ids=self._rows.sample_ids, offsets=self._rows.offsets, columns=columns).write(path)
        except OSError as error:
            log.warning("%s: cannot write the token values: %s", path, error)
