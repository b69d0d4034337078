"""Import of Megatron, mbridge and transformers for processes that do not compute with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from plasmid_convert.distributed.collection import paused_collection

VISION = "mbridge.models.glm4_vl"


@contextmanager
def import_without_compiler() -> Iterator[None]:
    """Provide a context in which importing Megatron and mbridge takes half the time.

    Skips what conversions do not need: Megatron-Core 0.16.1 imports wandb, and decorates functions with
    `torch.compile`, which imports torch's compiler; mbridge imports transformers' vision models for GLM-4.1V, which
    layouts do not support. Pauses garbage collection, because imports leave almost no garbage.
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
        with paused_collection():
            yield
    finally:
        torch.compile = compiler
        for name in hidden:
            del sys.modules[name]


@contextmanager
def skip_docstrings() -> Iterator[None]:
    """Stop transformers from generating docstrings of classes that are imported in the block.

    To generate the docstring of a config, transformers 5 imports its generation code, and scikit-learn if installed:
    3.2 s on a machine with GPUs.
    """
    module: Any = import_module("transformers.utils.auto_docstring")  # a function of this name hides the module
    write, module.auto_class_docstring = module.auto_class_docstring, lambda cls, **_: cls
    try:
        yield
    finally:
        module.auto_class_docstring = write
