"""Process group for weight broadcasts, independent of the groups of trainer ranks and server processes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from plasmid.utils.addresses import find_own_address
from plasmid_models.sync.rendezvous import Rendezvous, connect
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BroadcastGroup:
    """One member of a broadcast group. The group ends with the last reference."""

    group: Any
    store: Any

    @classmethod
    def join(cls, backend: str, *, rendezvous: str, rank: int, size: int, timeout: timedelta) -> Self:
        """Join as a receiver. All members must use the same NCCL_CUMEM_ENABLE.

        Raises `ValueError` if the rendezvous cannot belong to this run, `RuntimeError` if other members do not join.
        """
        store = connect(rendezvous, find_own_address(), timeout_s=timeout.total_seconds())
        return cls(_process_group(backend, store, rank, size, timeout), store)

    def broadcast(self, data: Tensor) -> None:
        """Send from rank 0 into the tensors of the others. Returns when the data has arrived."""
        self.group.broadcast([data], dist.BroadcastOptions()).wait()
        if data.is_cuda:
            torch.cuda.current_stream().synchronize()


class BroadcastHost:
    """Rank 0, which opens the rendezvous."""

    def __init__(self, backend: str, *, size: int, timeout: timedelta) -> None:
        self._rendezvous = Rendezvous(find_own_address(), timeout_s=timeout.total_seconds())
        self.url = self._rendezvous.url
        self._backend, self._size, self._timeout = backend, size, timeout

    @cached_property
    def group(self) -> BroadcastGroup:
        """Return the group. The first access waits for the other members."""
        store = self._rendezvous.store
        return BroadcastGroup(_process_group(self._backend, store, 0, self._size, self._timeout), store)


def _process_group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend != "nccl":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
