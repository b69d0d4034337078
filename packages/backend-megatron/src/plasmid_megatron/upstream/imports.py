"""Import of Megatron and mbridge for processes that do not compute with them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

VISION = "mbridge.models.glm4_vl"


@contextmanager
def import_without_compiler() -> Iterator[None]:
    """Leave out what conversions do not need while Megatron and mbridge are imported, which then takes half the time.

    Megatron-Core 0.16.1 imports wandb, and torch's compiler to decorate functions, which then stay as they are. mbridge
    imports vision models of transformers for GLM-4.1V, which layouts do not support. Garbage collection finds nothing.
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
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.compile = compiler
        for name in hidden:
            del sys.modules[name]
