"""Declares two operators before torchvision is imported: its wheel on the package index only has them for CUDA.

SGLang imports torchvision, which registers meta implementations of the operators on import, and fails without them.
Every start of Python imports this file, so it imports nothing itself and costs nothing until torchvision is imported.
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
"""Keeps the library object, because the operators are removed with it."""


class Declarer:
    """Declares the operators just before torchvision is imported; looking it up costs nothing."""

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
    """Declare the operators unless torch already has them."""
    import torch

    if torch.cuda.is_available() or _kept:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


sys.meta_path.insert(0, Declarer())
