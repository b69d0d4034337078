"""Types of weights."""

from __future__ import annotations

import torch
from torch import Tensor


def cast(tensor: Tensor, dtype: str | None) -> Tensor:
    """The tensor, of the dtype with this torch name if it has floats and one is asked for."""
    return tensor.to(getattr(torch, dtype)) if dtype is not None and tensor.is_floating_point() else tensor
