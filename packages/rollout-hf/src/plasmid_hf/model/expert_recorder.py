"""Recording of the experts that a mixture of experts chooses for each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from plasmid.types.routing import Experts
from plasmid_models.routing import expert_blocks
from torch import Tensor, nn
from transformers import PreTrainedModel


class ExpertRecorder:
    """Records the experts of forward passes. Outside of `record_pass`, it only costs one call per layer."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._num_layers = int(hf.config.get_text_config().num_hidden_layers)
        self._chosen: dict[int, list[Tensor]] = {}
        self._recorded: list[Experts] | None = None
        for layer, (_, experts) in expert_blocks(hf).items():
            experts.register_forward_pre_hook(partial(self._record, layer))

    @contextmanager
    def record_pass(self, wanted: bool) -> Iterator[list[Experts]]:
        """Record the forward pass within the context; the list gets the experts of each row, if ``wanted``."""
        recorded: list[Experts] = []
        self._recorded = recorded if wanted else None
        try:
            yield recorded
        finally:
            self._recorded = None
            self._chosen.clear()

    def deliver(self, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """End forward passes over sequences of these lengths in order; row i has the tokens of ``rows[i]``."""
        if self._recorded is None or not self._chosen:
            return
        found = {layer: torch.cat(parts) for layer, parts in self._chosen.items()}
        none = torch.zeros_like(next(iter(found.values())))
        chosen = torch.stack([found.get(layer, none) for layer in range(self._num_layers)], dim=1)
        parts = np.split(chosen.to(torch.int16).cpu().numpy(), np.cumsum(lengths)[:-1])
        self._recorded.extend(parts[row] for row in rows)

    def _record(self, layer: int, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._recorded is not None:
            self._chosen.setdefault(layer, []).append(inputs[1])
