"""Store the plan of a run, with the lengths of its first batch, in its folder, to compare it with measurements."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid.types.estimates import BatchLoad
from plasmid.utils.safe_files import write_text
from plasmid_models.estimates.accelerators import match_accelerator

from .plan import make_plan, read_configs, read_gpu_names

log = logging.getLogger(__name__)
ON_GPU = "gpu_peak_gb"
"""Suffix of metrics that only trainers on GPUs report."""


class PlanWriter:
    """Observer that writes the plan of a run after its first batch. Does nothing if there are no estimates."""

    def __init__(self, config: RunConfig, path: Path) -> None:
        self._config, self._path = config, path
        self._is_written = False

    def batch_finished(self, batch: int, metrics: Mapping[str, float]) -> None:
        """Write the plan, once."""
        if self._is_written or "perf/train_s" not in metrics:
            return
        self._is_written = True
        try:
            planned = estimate_batch(self._config, metrics)
        except PlasmidError as error:  # an unsupported model must not affect the run
            log.debug("no plan: %s", error)
            return
        if planned:
            write_text(self._path, json.dumps(planned, indent=1))


def estimate_batch(config: RunConfig, metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Estimate the trainer's peak memory and the time of each phase for a batch with the lengths in ``metrics``.

    Empty if the trainer has no estimates. Raises `PlasmidError` for unsupported models.
    """
    tokens = metrics.get("perf/tokens_per_s", 0.0) * metrics.get("perf/batch_s", 0.0)
    if not tokens:
        return {}
    models = read_configs(config)
    mean = max(2, round(tokens / config.rollouts_per_batch))
    response = min(mean - 1, max(1, round(metrics.get("rollout/length_mean", mean / 2))))
    load = BatchLoad(
        samples=config.rollouts_per_batch,
        prompts=config.run.prompts_per_batch,
        prompt_tokens=mean - response,
        response_tokens=response,
        longest=mean,
        steps=config.run.steps_per_batch,
    )
    names = read_gpu_names() if any(name.endswith(ON_GPU) for name in metrics) else []
    device = match_accelerator(names[0]) if names else None
    if device is None and any(name.endswith(ON_GPU) for name in metrics):
        return {}
    plan = make_plan(config, models, device, load)
    if "train" not in plan.trainer:
        return {}
    # the allocator's peak on a GPU, all of the process on a CPU
    peak = plan.trainer["train"].total if device is not None else plan.peak("trainer")
    planned: dict[str, float | str] = {"device": "CPU" if device is None else device.name, "trainer_bytes": peak}
    planned |= {f"{phase}_s": seconds for phase, seconds in plan.seconds.items()}
    return planned | ({} if plan.batch_seconds is None else {"batch_s": plan.batch_seconds})
