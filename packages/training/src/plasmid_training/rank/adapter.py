"""Tensors that a weight sync sends for a policy with or without an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from .backend import RankModel


def sent_tensors(
    policy: RankModel, mode: Literal["merged", "with_base", "alone"], *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight sync; ``mode`` is `SyncPlan.adapter`."""
    adapter = policy.adapter
    if adapter is None or mode == "merged":
        yield from policy.weights(dtype=dtype, device=device)
        return
    if mode == "with_base":
        with adapter.disable():
            yield from policy.weights(dtype=dtype, device=device)
    yield from adapter.weights(dtype=dtype, device=device)
