"""Declares two operators before torchvision is imported: its wheel of the package index has them for CUDA only.

SGLang imports torchvision, which gives the operators a meta implementation when it is imported, and fails without.
Costs nothing until somebody imports torchvision: every start of Python imports this file, so that it imports nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

OPERATORS = ("nms", "qnms")
_kept: list[Any] = []
"""Operators are gone with the library object that declared them."""


class Declarer:
    """Has the operators declared just before torchvision is really imported; to ask for it costs nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                declare()
                execute(module)

            loader.exec_module = exec_module
        return spec


def declare() -> None:
    """Declare the operators, unless torch has them."""
    import torch

    if torch.cuda.is_available() or _kept:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


sys.meta_path.insert(0, Declarer())
