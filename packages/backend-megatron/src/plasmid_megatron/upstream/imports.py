"""Import of Megatron, mbridge and transformers for processes that do not compute with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
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


@contextmanager
def skip_docstrings() -> Iterator[None]:
    """Provide a context in which transformers writes no docstrings of classes that it imports.

    For the docstring of a config, transformers 5 imports all code for generation, and scikit-learn if it is installed:
    3.2 s on a machine with GPUs.
    """
    module: Any = import_module("transformers.utils.auto_docstring")  # a function of this name hides the module
    write, module.auto_class_docstring = module.auto_class_docstring, lambda cls, **_: cls
    try:
        yield
    finally:
        module.auto_class_docstring = write
