"""Order of rows: epochs, shuffling, and a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from plasmid.components import DataFacts, PromptStream
from plasmid.errors import CheckpointError
from plasmid.types import Prompt


class IndexedPrompts(Protocol):
    """All prompts of a source, by index."""

    def __len__(self) -> int: ...

    def digests(self) -> list[list[str]]:
        """Return label and digest of each file, as JSON types."""

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of a row. Raises `DataError`."""

    def find(self, id: str) -> Prompt:
        """Return the prompt with this id, which must exist."""

    @property
    def left_out(self) -> int:
        """Number of rows that are too long, which have no index."""

    @property
    def truncated(self) -> int:
        """Number of rows that are cut at the maximum length."""

    @property
    def format(self) -> str:
        """Framework whose row format was detected, or an empty string."""

    @property
    def profiles(self) -> Mapping[str, str]:
        """Profiles that rows select, each with the location of the first such row."""


class RowStream(PromptStream):
    """Draws every row once per epoch."""

    def __init__(self, rows: IndexedPrompts, *, epochs: int | None, seed: int | None) -> None:
        """Without ``epochs`` the stream is endless; without a ``seed`` rows are not shuffled."""
        self._rows, self._epochs, self._seed = rows, epochs, seed
        self._files = rows.digests()
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Number of rows per epoch."""
        return len(self._rows)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))

    def draw(self) -> Prompt | None:
        """Return the next prompt, or None after the last epoch."""
        if self._position == len(self._rows):
            if self._epoch + 1 == self._epochs:
                return None
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        prompt = self._rows.prompt(int(self._order[self._position]))
        self._position += 1
        return prompt

    def prompt(self, id: str) -> Prompt:
        """Return the prompt with this id."""
        return self._rows.find(id)

    def state(self) -> Mapping[str, Any]:
        """Return epoch, position, and digests to detect changes of the data on resume."""
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._rows), "files": self._files}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the data has changed."""
        self._check_same(state["files"], int(state["rows"]))
        if state["epoch"] != self._epoch:
            self._order = self._order_of(int(state["epoch"]))
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def metrics(self) -> Mapping[str, float]:
        """Return the number of epochs so far, including the fraction of the current one."""
        return {"data/epoch": self._epoch + self._position / len(self._rows)}

    def facts(self) -> DataFacts:
        """Return the numbers of rows and of too long rows, the row format, and the profiles that rows select."""
        return DataFacts(
            num_prompts=len(self),
            num_draws=None if self._epochs is None else self._epochs * len(self),
            left_out=self._rows.left_out,
            truncated=self._rows.truncated,
            format=self._rows.format,
            profiles=self._rows.profiles,
        )

    def _check_same(self, files: Sequence[Sequence[str]], num_rows: int) -> None:
        then, now = [label for label, _ in files], [label for label, _ in self._files]
        if then != now:
            raise CheckpointError(
                f"data.path: must be the files of the checkpoint, {', '.join(then)}, got {', '.join(now)}"
            )
        for (label, old), (_, new) in zip(files, self._files, strict=True):
            if old != new:
                raise CheckpointError(
                    f"data.path: {label} or its slice has changed since the checkpoint was saved; restore it, or "
                    "start a new run"
                )
        if num_rows != len(self._rows):
            raise CheckpointError(
                f"data.max_prompt_tokens: leaves {len(self._rows)} prompts, but left {num_rows} when the checkpoint "
                "was saved; restore it, or start a new run"
            )
