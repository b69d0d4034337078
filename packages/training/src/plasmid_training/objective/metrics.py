"""Metrics of one optimizer step that mean the same however the step was split over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .mismatch import mismatch_summary

AllReduce = Callable[[Tensor], Tensor]
"""Sum of a tensor over ranks."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepMetrics:
    """Sums over loss tokens, largest values, and the loss; on the device until `reduce`."""

    loss: Tensor | None = None
    """Part of the step's loss that was seen here."""
    num_tokens: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Divided by the number of loss tokens in the end."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Of values that are at least 0."""
    mismatch: Tensor | None = None
    """Histogram of `log_ratio_counts`, if there is an engine to differ from."""

    def add(
        self,
        *,
        loss: Tensor,
        values: Mapping[str, Tensor],
        maxima: Mapping[str, Tensor],
        num_tokens: int,
        mismatch: Tensor | None = None,
    ) -> None:
        """Add one microbatch: its weighted loss and [T] values of its loss tokens by name."""
        part = loss.detach().double()
        self.loss = part if self.loss is None else self.loss + part
        self.num_tokens += num_tokens
        if mismatch is not None:
            self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch
        for name, value in values.items():
            total = value.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for name, value in maxima.items():
            largest = value.detach().double().amax() if value.numel() else value.new_zeros((), dtype=torch.float64)
            self.maxima[name] = torch.maximum(self.maxima[name], largest) if name in self.maxima else largest

    def reduce(self, all_reduce: AllReduce, *, rank: int, num_ranks: int) -> dict[str, float]:
        """``train/<name>`` over all ranks, by one sum over ranks. Every rank must have added equally many microbatches.

        ``train/loss`` is the step's loss; maxima are named ``<name>_max``.
        """
        if self.loss is None:
            raise ValueError("no microbatch was added")
        sums, maxima = sorted(self.sums), sorted(self.maxima)
        head = torch.stack([self.loss, self.loss.new_tensor(float(self.num_tokens)), *(self.sums[n] for n in sums)])
        own = torch.stack([self.maxima[n] for n in maxima]) if maxima else head.new_zeros(0)
        slots = head.new_zeros(num_ranks, len(maxima))  # each rank fills its row: the sum holds every rank's maxima
        slots[rank] = own
        counts = head.new_zeros(0) if self.mismatch is None else self.mismatch
        reduced = all_reduce(torch.cat([head, slots.flatten(), counts])).cpu()
        loss, num_tokens, *totals = reduced[: len(head)].tolist()
        largest = reduced[len(head) : len(head) + slots.numel()].reshape(num_ranks, len(maxima))
        means = {n: total / max(num_tokens, 1.0) for n, total in zip(sums, totals, strict=True)}
        result = {"loss": loss, **means}
        if maxima:
            result |= {f"{n}_max": v for n, v in zip(maxima, largest.amax(0).tolist(), strict=True)}
        if self.mismatch is not None:
            result |= mismatch_summary(means, reduced[len(head) + slots.numel() :])
            del result["mismatch_ratio_squared"]
        return {f"train/{name}": value for name, value in result.items()}


def alone(tensor: Tensor) -> Tensor:
    """The sum over the ranks of a run that has only one."""
    return tensor
