"""Profiling of batches with `torch.profiler`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)
TABLE_ROWS = 40


@contextlib.contextmanager
def write_profile(stem: Path, device: torch.device) -> Iterator[None]:
    """Profile the context with `torch.profiler`.

    Writes ``<stem>.json.gz`` (Chrome's trace format, which Perfetto opens) and ``<stem>.txt`` (operators sorted by self
    time). Errors in writing are logged and do not end the run.
    """
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities, record_shapes=True) as recorded:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(f"{stem}.json.gz")
        Path(f"{stem}.txt").write_text(recorded.key_averages().table(sort_by=order, row_limit=TABLE_ROWS))
    except (OSError, RuntimeError) as error:
        log.warning("%s.json.gz: cannot write the profile: %s", stem, error)
