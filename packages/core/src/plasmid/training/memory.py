"""Memory of a rank's process and its GPU: gauges, and giving back what is free."""

from __future__ import annotations

import contextlib
import ctypes

import psutil
import torch


def memory_metrics(name: str, device: torch.device) -> dict[str, float]:
    """``memory/<name>/...`` in GB, and ``gpu/<name>/...`` where there is one and its driver can be asked."""
    metrics = {f"memory/{name}/rss_gb": psutil.Process().memory_info().rss / 1e9}
    if device.type == "cuda":
        metrics[f"memory/{name}/gpu_allocated_gb"] = torch.cuda.memory_allocated(device) / 1e9
        metrics[f"memory/{name}/gpu_peak_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        free, total = torch.cuda.mem_get_info(device)
        metrics[f"gpu/{name}/used_gb"] = (total - free) / 1e9
        with contextlib.suppress(ImportError, RuntimeError):  # asking needs the package nvidia-ml-py
            metrics[f"gpu/{name}/utilization"] = torch.cuda.utilization(device) / 100
            metrics[f"gpu/{name}/power_w"] = torch.cuda.power_draw(device) / 1000
    return metrics


def give_back_memory() -> None:
    """Return freed heap pages to the system.

    On a CPU every gathered weight and gradient passes through the heap, and the C library keeps what is freed: without
    this a trainer of a 135M model was seen to hold 5.4 GB instead of 4. Does nothing where the C library is not GNU's.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
