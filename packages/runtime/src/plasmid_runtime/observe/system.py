"""Gauges of this machine: memory of the run's processes, and utilization, memory and power of GPUs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Any

import psutil

GIB = 2**30
PROCESSES_INTERVAL_S = 1.0
"""Minimum time between two listings of the run's processes, which read a file of every process of the machine."""
PSS_INTERVAL_S = 30.0
"""Minimum time between two measurements of shared pages: the kernel walks all pages of a process, which blocks it."""


class SystemMonitor:
    """Samples gauges in a separate thread, to detect peaks between two batches.

    Includes this process and all its descendants (with a private Ray cluster, also Ray's processes and every actor),
    and the processes ``pids`` with their descendants.
    """

    def __init__(
        self,
        *,
        interval_s: float = 2.0,
        processes_interval_s: float = PROCESSES_INTERVAL_S,
        pss_interval_s: float = PSS_INTERVAL_S,
        pids: Iterable[int] = (),
    ) -> None:
        self._processes_interval_s = processes_interval_s
        self._interval_s, self._pss_interval_s = interval_s, pss_interval_s
        self._pids = (psutil.Process().pid, *pids)
        self._gpus = Gpus()
        self._peak = 0.0
        self._pss, self._pss_until = 0.0, 0.0
        self._found: list[psutil.Process] = []
        self._found_until = 0.0
        self._utilization: list[list[float]] = []
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-monitor", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return current gauges, and peaks and means since the last call.

        ``memory/rss_gib`` is the sum over processes, in which shared pages count several times; ``memory/pss_gib``
        counts them once, if the system supports it, and is measured every ``pss_interval_s``;
        ``memory/rss_peak_gib`` is the largest sum. For each GPU:
        ``gpu/<index>/utilization`` (mean, percent), ``gpu/<index>/memory_gib``, ``gpu/<index>/power_w``.
        """
        found = self._processes()
        rss = _rss(found)
        with self._lock:
            peak, self._peak = max(self._peak, rss), 0.0
            seen, self._utilization = self._utilization, []
        metrics = {"memory/rss_gib": rss / GIB, "memory/rss_peak_gib": peak / GIB}
        if time.monotonic() >= self._pss_until:
            self._pss = _pss(found)
            self._pss_until = time.monotonic() + self._pss_interval_s
        if self._pss:
            metrics["memory/pss_gib"] = self._pss / GIB
        return metrics | self._gpus.metrics(seen)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=5)
        self._gpus.close()

    def _work(self) -> None:
        while not self._ended.wait(self._interval_s):
            rss, utilization = _rss(self._processes()), self._gpus.utilization()
            with self._lock:
                self._peak = max(self._peak, rss)
                self._utilization.append(utilization)

    def _processes(self) -> list[psutil.Process]:
        if time.monotonic() < self._found_until:
            return self._found
        found: dict[int, psutil.Process] = {}
        for pid in self._pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
        self._found = list(found.values())
        self._found_until = time.monotonic() + self._processes_interval_s
        return self._found


class Gpus:
    """GPUs reported by NVIDIA's driver; none without a driver or without ``nvidia-ml-py``."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        with contextlib.suppress(ImportError):
            import pynvml

            self._nvml = pynvml
        if self._nvml is None:
            return
        with contextlib.suppress(self._nvml.NVMLError):  # no driver, or no permission: gauges are optional
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def utilization(self) -> list[float]:
        """Return the utilization of each GPU over the driver's last sampling period, in percent."""
        return [self._query(h, lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu) for h in self._handles]

    def metrics(self, utilization: list[list[float]]) -> dict[str, float]:
        """Return gauges by GPU; utilization is the mean over these samples and the current one."""
        rows = [*utilization, self.utilization()]
        metrics: dict[str, float] = {}
        for i, handle in enumerate(self._handles):
            values = {
                "utilization": sum(row[i] for row in rows) / len(rows),
                "memory_gib": self._query(handle, lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used / GIB),
                "power_w": self._query(handle, lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000),
            }
            metrics |= {f"gpu/{i}/{name}": value for name, value in values.items() if value == value}
        return metrics

    def close(self) -> None:
        """Close the connection to the driver."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _query(self, handle: Any, question: Any) -> float:
        try:
            return float(question(self._nvml, handle))
        except self._nvml.NVMLError:  # some GPUs do not support all queries
            return float("nan")


def _rss(processes: Iterable[psutil.Process]) -> float:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return float(total)


def _pss(processes: Iterable[psutil.Process]) -> float:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, AttributeError):
            total += process.memory_full_info().pss
    return float(total)
