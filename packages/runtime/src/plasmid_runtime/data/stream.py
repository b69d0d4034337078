"""The order in which rows are drawn: epochs, shuffling, and a cursor that can be saved."""

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
        """Label and digest of each file, as JSON keeps them."""
        ...

    def prompt(self, index: int) -> Prompt:
        """One row. Raises `DataError`."""
        ...

    def find(self, id: str) -> Prompt:
        """The prompt of an id, which must be that of a row."""
        ...

    @property
    def left_out(self) -> int:
        """Rows that are too long, so that no index leads to them."""
        ...

    @property
    def profiles(self) -> Mapping[str, str]:
        """Each profile that rows name, and where the first of them stands."""
        ...


class RowStream(PromptStream):
    """Draws every row once per epoch."""

    def __init__(self, rows: IndexedPrompts, *, epochs: int | None, seed: int | None) -> None:
        """Without ``epochs`` there is no end; without a ``seed`` rows keep their order."""
        self._rows, self._epochs, self._seed = rows, epochs, seed
        self._files = rows.digests()
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._rows)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(len(self._rows))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))

    def draw(self) -> Prompt | None:
        """The next prompt; None after the last epoch."""
        if self._position == len(self._rows):
            if self._epoch + 1 == self._epochs:
                return None
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        prompt = self._rows.prompt(int(self._order[self._position]))
        self._position += 1
        return prompt

    def prompt(self, id: str) -> Prompt:
        """The row of an id."""
        return self._rows.find(id)

    def state(self) -> Mapping[str, Any]:
        """Epoch and position, and digests that prove that the data are still the same."""
        return {"epoch": self._epoch, "position": self._position, "rows": len(self._rows), "files": self._files}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises `CheckpointError` if the data are others than they were."""
        self._check_same(state["files"], int(state["rows"]))
        if state["epoch"] != self._epoch:
            self._order = self._order_of(int(state["epoch"]))
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def metrics(self) -> Mapping[str, float]:
        """Epochs drawn so far, as a fraction."""
        return {"data/epoch": self._epoch + self._position / len(self._rows)}

    def facts(self) -> DataFacts:
        """Rows of one epoch, those that are too long, and the profiles that rows name."""
        draws = None if self._epochs is None else self._epochs * len(self)
        return DataFacts(
            num_prompts=len(self), num_draws=draws, left_out=self._rows.left_out, profiles=self._rows.profiles
        )

    def _check_same(self, files: Sequence[Sequence[str]], num_rows: int) -> None:
        then, now = [label for label, _ in files], [label for label, _ in self._files]
        if then != now:
            raise CheckpointError(
                f"data.path: the checkpoint was saved with {', '.join(then)}, this run reads {', '.join(now)}; "
                "name the same files"
            )
        for (label, old), (_, new) in zip(files, self._files, strict=True):
            if old != new:
                raise CheckpointError(
                    f"data.path: {label} or its slice has changed since the checkpoint was saved; put it back as it "
                    "was, or start a new run"
                )
        if num_rows != len(self._rows):
            raise CheckpointError(
                f"data.max_prompt_tokens: leaves {len(self._rows)} prompts, it left {num_rows} when the checkpoint was "
                "saved; set it as it was, or start a new run"
            )
