"""Model FLOPs utilization of training (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid.types.batch import GroupRef
from plasmid_models.estimates.accelerators import match_accelerator
from plasmid_models.estimates.shape import ModelShape

from .plan import read_configs, read_gpu_names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainUtilization:
    """FLOPs that training the policy needs, relative to the peak of the trainer's GPUs."""

    shape: ModelShape
    peak: float
    """Dense bfloat16 FLOP/s of all GPUs of the trainer together, as specified by the vendor."""
    has_adapter: bool
    """True if base weights are frozen, so that they need no gradients."""

    @classmethod
    def of(cls, config: RunConfig) -> TrainUtilization | None:
        """Return None without GPUs in the table of `rl plan` on this machine, or if the model's family is unknown."""
        names = [] if config.placement.device == "cpu" else read_gpu_names()
        device = match_accelerator(names[0]) if names else None
        if device is None:
            return None
        try:
            shape = ModelShape.of(read_configs(config)["model"])
        except PlasmidError as error:  # an unsupported model must not affect the run
            log.debug("no perf/mfu: %s", error)
            return None
        peak = device.flops * config.placement.trainer_ranks
        return cls(shape=shape, peak=peak, has_adapter=config.trainer.adapter() is not None)

    def flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of a forward and backward pass over samples of these lengths, prompts included.

        No recomputation, and no reduction for shared prompts, counts; layers with linear attention count their
        projections only. Causal attention needs ``query + value`` FLOPs per layer and squared token.
        """
        shape = self.shape
        linear = 2 * shape.active * sum(lengths) * (2 if self.has_adapter else 3)
        return linear + 3 * shape.attending * (shape.query + shape.value) * sum(length**2 for length in lengths)

    def metrics(self, groups: Sequence[GroupRef], train_s: float | None) -> Mapping[str, float]:
        """Return ``perf/mfu`` of a batch that was trained in ``train_s`` seconds; empty if nothing was trained."""
        if not train_s:
            return {}
        lengths = [int(length) for group in groups for length in group.lengths]
        return {"perf/mfu": self.flops(lengths) / (train_s * self.peak)}
