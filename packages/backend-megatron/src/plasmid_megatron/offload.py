"""Moves what a model takes of a GPU to the host and back. Views and everything that refers to a tensor stay valid."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Offloaded:
    """Memory of tensors on its way: on the host between `out` and `back`."""

    def __init__(self) -> None:
        self._kept: list[tuple[UntypedStorage, int, Tensor | None]] = []

    def out(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the memory of all tensors that lie on a GPU; without ``keep`` they come back as zeros."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if storage.device.type == "cuda" and size:
                self._kept.append((storage, size, _copy(storage, size) if keep else None))
                storage.resize_(0)

    def back(self) -> None:
        """Undo every `out` since the last time."""
        for storage, size, content in self._kept:
            storage.resize_(size)
            if content is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(content, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        self._kept.clear()


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(storage: UntypedStorage, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True).copy_(_bytes(storage))
