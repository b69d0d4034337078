"""Moves what a model takes of a GPU to the host and back. Views and everything that refers to a tensor stay valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Memory of a tensor that is on the host, or nowhere."""

    storage: UntypedStorage
    size: int
    content: Tensor | None


class Offloaded:
    """Memory of tensors on its way: on the host between `out` and `back`.

    The host's memory is pinned and kept for the next time: pinning takes longer than the copies.
    """

    def __init__(self) -> None:
        self._away: list[Moved] = []
        self._pinned: dict[int, Tensor] = {}
        """By the storage that it is for."""

    def out(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the memory of all tensors that lie on a GPU; without ``keep`` they come back as zeros."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == "cuda" and storage.nbytes():
                found[storage._cdata] = storage
        moved = [Moved(s, s.nbytes(), self._copy(s) if keep else None) for s in found.values()]
        if found:
            torch.cuda.synchronize()  # the copies are done before what they read is free
        for one in moved:
            one.storage.resize_(0)
        self._away += moved

    def back(self) -> None:
        """Undo every `out` since the last time."""
        for one in self._away:
            one.storage.resize_(one.size)
            if one.content is None:
                _bytes(one.storage).zero_()
            else:
                _bytes(one.storage).copy_(one.content, non_blocking=True)
        if self._away:
            torch.cuda.synchronize()
        there = {one.storage._cdata for one in self._away}
        self._pinned = {key: kept for key, kept in self._pinned.items() if key in there}
        self._away.clear()

    def _copy(self, storage: UntypedStorage) -> Tensor:
        kept = self._pinned.get(storage._cdata)
        if kept is None or kept.numel() != storage.nbytes():
            kept = self._pinned[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return kept.copy_(_bytes(storage), non_blocking=True)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
