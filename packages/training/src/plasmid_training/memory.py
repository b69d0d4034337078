"""Memory of a rank's process and its GPU: gauges, peaks by phase, and giving back what is free."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import psutil
import torch


class Memory:
    """What one rank takes up. Peaks are those of the phases that were run under `phase`."""

    def __init__(self, name: str, device: torch.device) -> None:
        """``name`` is what the metrics call the rank."""
        self._name, self._device = name, device
        self._peak = 0
        self._phases: dict[str, tuple[int, int]] = {}
        """Bytes by phase: the most that this process had allocated, and what all had taken of the GPU afterwards."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note what is taken up within the context. Costs nothing where there is no GPU."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        peak = torch.cuda.max_memory_allocated(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        self._phases[name] = peak, total - free
        self._peak = max(self._peak, peak)

    def metrics(self) -> dict[str, float]:
        """``memory/<name>/...`` in GB, and ``gpu/<name>/...`` where there is one and its driver can be asked."""
        name, device = self._name, self._device
        metrics = {f"memory/{name}/rss_gb": psutil.Process().memory_info().rss / 1e9}
        if device.type == "cuda":
            metrics[f"memory/{name}/gpu_allocated_gb"] = torch.cuda.memory_allocated(device) / 1e9
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(device))
            metrics[f"memory/{name}/gpu_peak_gb"] = self._peak / 1e9
            for phase, (peak, used) in self._phases.items():
                metrics[f"memory/{name}/gpu_peak_{phase}_gb"] = peak / 1e9
                metrics[f"gpu/{name}/used_{phase}_gb"] = used / 1e9
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
