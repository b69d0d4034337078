"""A process group beside the one that a trainer rank or an SGLang process has already: rank 0 sends to all others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from plasmid.addresses import own_address
from plasmid.training.rendezvous import Rendezvous, connect
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Members of one broadcast. Gone with the last reference."""

    group: Any
    store: Any

    @classmethod
    def join(cls, backend: str, *, rendezvous: str, rank: int, size: int, timeout: timedelta) -> Self:
        """Meet the others where rank 0 says. All must set NCCL_CUMEM_ENABLE alike (SGLang sets it to 0).

        Raises `ValueError` if the rendezvous cannot be this run's, `RuntimeError` if the others are not there.
        """
        store = connect(rendezvous, own_address(), timeout_s=timeout.total_seconds())
        return cls(_group(backend, store, rank, size, timeout), store)

    def broadcast(self, data: Tensor) -> None:
        """From rank 0 into the others' tensor; returns when it is there."""
        self.group.broadcast([data], dist.BroadcastOptions()).wait()
        if data.is_cuda:
            torch.cuda.current_stream().synchronize()


class Host:
    """Rank 0: opens the rendezvous."""

    def __init__(self, backend: str, *, size: int, timeout: timedelta) -> None:
        self._rendezvous = Rendezvous(own_address(), timeout_s=timeout.total_seconds())
        self.url = self._rendezvous.url
        self._backend, self._size, self._timeout = backend, size, timeout

    @cached_property
    def group(self) -> Group:
        """The first call meets the others, who must be on their way."""
        store = self._rendezvous.store
        return Group(_group(self._backend, store, 0, self._size, self._timeout), store)


def _group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if backend != "nccl":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
