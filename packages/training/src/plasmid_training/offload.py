"""Move the memory of tensors between GPU and host. Views and other references to the tensors stay valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage


@dataclass(frozen=True, slots=True, eq=False)
class MovedStorage:
    """A GPU storage whose memory was freed. `content` is its copy on the host; None if the content was discarded."""

    storage: UntypedStorage
    size: int
    content: Tensor | None


class OffloadedMemory:
    """Memory of tensors that is on the host between `move_out` and `restore`.

    Host memory is pinned and reused the next time, because pinning takes longer than copying.
    """

    def __init__(self) -> None:
        self._offloaded: list[MovedStorage] = []
        self._pinned: dict[int, Tensor] = {}
        """Pinned buffers by GPU storage."""

    def move_out(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Free the memory of all tensors on a GPU; without ``keep`` they are restored as zeros."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == "cuda" and storage.nbytes():
                found[storage._cdata] = storage
        moved = [MovedStorage(s, s.nbytes(), self._copy(s) if keep else None) for s in found.values()]
        if found:
            torch.cuda.synchronize()  # finish the copies before freeing their source
        for item in moved:
            item.storage.resize_(0)
        self._offloaded += moved

    def restore(self) -> None:
        """Undo every `move_out` since the last `restore`."""
        for item in self._offloaded:
            item.storage.resize_(item.size)
            if item.content is None:
                _bytes(item.storage).zero_()
            else:
                _bytes(item.storage).copy_(item.content, non_blocking=True)
        if self._offloaded:
            torch.cuda.synchronize()
        restored = {item.storage._cdata for item in self._offloaded}
        self._pinned = {key: buffer for key, buffer in self._pinned.items() if key in restored}
        self._offloaded.clear()

    def _copy(self, storage: UntypedStorage) -> Tensor:
        buffer = self._pinned.get(storage._cdata)
        if buffer is None or buffer.numel() != storage.nbytes():
            buffer = self._pinned[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return buffer.copy_(_bytes(storage), non_blocking=True)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
