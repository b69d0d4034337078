"""Dtype casts of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(tensor: Tensor, dtype: str | None) -> Tensor:
    """Cast a floating-point tensor to the torch dtype of this name; other tensors, and None, leave it unchanged."""
    return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor
