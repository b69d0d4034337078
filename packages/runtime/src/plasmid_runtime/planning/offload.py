"""Choose whether trainer and engine, if they share GPUs, are offloaded from GPU memory while they are idle."""

from __future__ import annotations

import math
from collections.abc import Callable

from plasmid.config.run import RunConfig
from plasmid.errors import PlasmidError
from plasmid_models.estimates.accelerators import GIB, match_accelerator

from .load import Lengths, batch_load
from .plan import Plan, make_plan, read_configs, read_gpu_names

MARGIN = 0.08
"""Fraction of a GPU's memory that the plan must leave free. Measured peaks of trainers were up to 11% above the
estimates; `RESERVE` covers a part of this difference."""


def resolve_offload(config: RunConfig) -> tuple[RunConfig, str]:
    """Replace ``auto`` in the offload settings by the values that this machine's GPUs require; also return the reason.

    Without GPUs, nothing is offloaded. If there is no plan for the GPUs or the models, both are offloaded. The reason
    is empty if no setting had to be chosen.
    """
    place = config.placement
    if "auto" not in (place.offload_trainer, place.offload_engine):
        return config, ""
    names = read_gpu_names()
    on_gpu = place.device == "cuda" or (place.device == "auto" and bool(names))
    if not (_is_shared(config) and on_gpu):
        return _replace(config, trainer=False, engine=False), ""
    device = match_accelerator(names[0]) if names else None
    if device is None:
        return _replace(config, trainer=True, engine=True), "the memory of the GPUs is unknown here"
    try:
        models = read_configs(config)
        load, _ = batch_load(config, models["model"], Lengths())
        return choose_offload(config, lambda changed: make_plan(changed, models, device, load))
    except PlasmidError as error:
        return _replace(config, trainer=True, engine=True), f"there is no plan: {error}"


def choose_offload(config: RunConfig, make: Callable[[RunConfig], Plan]) -> tuple[RunConfig, str]:
    """Offload nothing if the plan then leaves enough memory free, else the engine if that is enough, else both."""
    for trainer, engine in ((False, False), (False, True)):
        changed = _replace(config, trainer=trainer, engine=engine)
        plan = make(changed)
        if plan.device is None or not _is_shared(config):
            return changed, ""
        peak = max((usage.total for usage in plan.usages), default=math.inf)
        if peak <= (1 - MARGIN) * plan.limit and plan.trainer and plan.engine:
            return changed, f"{peak / GIB:.0f} of {plan.limit / GIB:.0f} GiB in use according to the plan"
    return _replace(config, trainer=True, engine=True), "offloading less would leave too little free memory"


def _is_shared(config: RunConfig) -> bool:
    return config.placement.colocated and config.engine_ranks > 0


def _replace(config: RunConfig, *, trainer: bool, engine: bool) -> RunConfig:
    """Replace only settings that are ``auto``."""
    place = config.placement
    chosen = {"offload_trainer": trainer, "offload_engine": engine}
    update = {name: value for name, value in chosen.items() if getattr(place, name) == "auto"}
    return config.model_copy(update={"placement": place.model_copy(update=update)})
