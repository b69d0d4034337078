"""Import of Megatron and mbridge for processes that do not compute with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

VISION = "mbridge.models.glm4_vl"


@contextmanager
def import_without_compiler() -> Iterator[None]:
    """Provide a context in which importing Megatron and mbridge takes half the time.

    Skips what conversions do not need: Megatron-Core 0.16.1 imports wandb, and decorates functions with
    `torch.compile`, which imports torch's compiler; mbridge imports transformers' vision models for GLM-4.1V, which
    layouts do not support.
    """
    if "megatron.core" in sys.modules:
        yield
        return
    import torch

    vision: Any = ModuleType(VISION)
    vision.Glm4VLBridgeMoe = vision.Glm4VLBridgeDense = None
    hidden = {name: module for name, module in {"wandb": None, VISION: vision}.items() if name not in sys.modules}
    sys.modules.update(hidden)
    compiler, torch.compile = torch.compile, lambda function, **_: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler
        for name in hidden:
            del sys.modules[name]
