"""A process group beside the one that a trainer rank or an SGLang process has already: rank 0 sends to all others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Members of one broadcast. Gone with the last reference."""

    group: Any
    store: Any

    @classmethod
    def join(cls, backend: str, *, host: str, port: int, rank: int, size: int, timeout: timedelta) -> Self:
        """Meet the others; rank 0 keeps the address. All must set NCCL_CUMEM_ENABLE alike (SGLang sets it to 0)."""
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, rank == 0, timeout=timeout, wait_for_workers=False
        )
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            group = dist.ProcessGroupGloo(store, rank, size, timeout)
        return cls(group, store)

    def broadcast(self, data: Tensor) -> None:
        """From rank 0 into the others' tensor; returns when it is there."""
        self.group.broadcast([data], dist.BroadcastOptions()).wait()
        if data.is_cuda:
            torch.cuda.current_stream().synchronize()
