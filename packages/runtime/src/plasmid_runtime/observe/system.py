"""Gauges of this machine: memory of all processes of the run, and what its GPUs do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any

import psutil

GIB = 2**30


class SystemMonitor:
    """Samples in a thread of its own, so that a peak between two batches is seen too.

    Counted are this process, all its descendants (with a Ray started by it: Ray's own processes and every actor), and
    the processes named by ``pids`` with theirs.
    """

    def __init__(self, *, interval_s: float = 2.0, pids: Iterable[int] = ()) -> None:
        self._interval_s = interval_s
        self._pids = (psutil.Process().pid, *pids)
        self._gpus = Gpus()
        self._peak = 0.0
        self._utilization: list[list[float]] = []
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="system-monitor", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Gauges now, and peaks and means since the last call.

        ``memory/rss_gib`` is the sum over the processes (pages that they share count several times), ``memory/pss_gib``
        counts shared pages once where the system tells, ``memory/rss_peak_gib`` is the largest sum seen. Of each GPU:
        ``gpu/<index>/utilization`` (mean, percent), ``gpu/<index>/memory_gib``, ``gpu/<index>/power_w``.
        """
        found = self._processes()
        rss = _rss(found)
        with self._lock:
            peak, self._peak = max(self._peak, rss), 0.0
            seen, self._utilization = self._utilization, []
        metrics = {"memory/rss_gib": rss / GIB, "memory/rss_peak_gib": peak / GIB}
        if pss := _pss(found):
            metrics["memory/pss_gib"] = pss / GIB
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
        found: dict[int, psutil.Process] = {}
        for pid in self._pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
        return list(found.values())


class Gpus:
    """The GPUs that NVIDIA's driver shows; none where there is no driver or no ``nvidia-ml-py``."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        with contextlib.suppress(ImportError):
            import pynvml

            self._nvml = pynvml
        if self._nvml is None:
            return
        with contextlib.suppress(self._nvml.NVMLError):  # no driver, or no right to ask it: gauges are an extra
            self._nvml.nvmlInit()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def __len__(self) -> int:
        return len(self._handles)

    def utilization(self) -> list[float]:
        """[GPUs] percent of the last moments in which a kernel ran."""
        return [self._ask(h, lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu) for h in self._handles]

    def metrics(self, utilization: list[list[float]]) -> dict[str, float]:
        """Gauges by GPU; the utilisation is the mean over these and the present one."""
        rows = [*utilization, self.utilization()]
        metrics: dict[str, float] = {}
        for i, handle in enumerate(self._handles):
            values = {
                "utilization": sum(row[i] for row in rows) / len(rows),
                "memory_gib": self._ask(handle, lambda n, h: n.nvmlDeviceGetMemoryInfo(h).used / GIB),
                "power_w": self._ask(handle, lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1000),
            }
            metrics |= {f"gpu/{i}/{name}": value for name, value in values.items() if value == value}
        return metrics

    def close(self) -> None:
        """Let go of the driver."""
        if self._handles:
            self._handles = []
            self._nvml.nvmlShutdown()

    def _ask(self, handle: Any, question: Any) -> float:
        try:
            return float(question(self._nvml, handle))
        except self._nvml.NVMLError:  # some GPUs do not tell everything
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
