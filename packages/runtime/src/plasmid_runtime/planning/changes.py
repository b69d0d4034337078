"""Find the smallest change of a recipe that makes it fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pluggy
from plasmid.config.load import merge, parse_override, resolve_with
from plasmid.config.run import RunConfig
from plasmid.errors import ConfigError
from plasmid.plugins.registry import load_plugins

from .plan import Plan

MakePlan = Callable[[RunConfig], Plan]
MAX_SETTINGS = 3
MIN_TOKENS = 1024
"""Minimum microbatch to propose, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Change:
    """Settings that make a recipe fit, and the resulting plan."""

    settings: tuple[str, ...]
    plan: Plan


def find_change(plan: Plan, make: MakePlan) -> Change | None:
    """Return the smallest number of settings that makes the recipe fit, with the shortest batch time among equals.

    More GPUs and a LoRA adapter are tried last, since they cost money or change what is trained. Returns None if no
    change helps.
    """
    plugins = load_plugins(files=map(Path, plan.config.plugins))
    here, further = tuple(_list_cheap_changes(plan)), tuple(_list_costly_changes(plan))
    for most in range(1, MAX_SETTINGS + 1):
        found = _find_fitting(plan, plugins, make, [_flatten(chosen) for chosen in combinations(here, most)])
        if found is not None:
            return found
    for most in range(MAX_SETTINGS):
        together = [_flatten((one, *chosen)) for one in further for chosen in combinations(here, most)]
        found = _find_fitting(plan, plugins, make, together)
        if found is not None:
            return found
    return None


def _flatten(chosen: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(setting for settings in chosen for setting in settings)


def _find_fitting(
    plan: Plan, plugins: pluggy.PluginManager, make: MakePlan, candidates: Sequence[tuple[str, ...]]
) -> Change | None:
    """Return the fitting candidate with the fewest GPUs, then the shortest batch time."""
    fitting: list[Change] = []
    tried: set[tuple[str, ...]] = set()
    for settings in candidates:
        keys = tuple(setting.partition("=")[0] for setting in settings)
        if len(set(keys)) < len(keys) or keys in tried:
            continue  # values of a setting are ordered, so the first that fits is the smallest change
        changed = _make_changed(plan.config, plugins, settings, make)
        if changed is not None and changed.fits:
            tried.add(keys)
            fitting.append(Change(settings=settings, plan=changed))
    return min(fitting, key=lambda change: (change.plan.gpus, change.plan.batch_seconds or 0.0), default=None)


def _make_changed(
    config: RunConfig, plugins: pluggy.PluginManager, settings: Sequence[str], make: MakePlan
) -> Plan | None:
    """Return the plan of the changed recipe; None if the recipe is invalid."""
    data = config.model_dump(mode="json")
    try:
        for setting in settings:
            data = merge(data, parse_override(setting))
        return make(resolve_with(plugins, data))
    except ConfigError:
        return None


def _list_cheap_changes(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield settings that cost time but do not change what is trained."""
    config, place = plan.config, plan.config.placement
    if plan.device is not None and place.colocated:
        yield from (
            (f"placement.{name}=true",) for name in ("offload_engine", "offload_trainer") if not getattr(place, name)
        )
    if any("activations" in usage.memory for usage in plan.overfull):
        yield from _list_trainer_changes(plan)
    name = "" if config.rollout is None else config.rollout.memory_share
    if name:
        share = getattr(config.rollout, "server_args", {}).get(name, 0.85)
        raised = [tenths for tenths in range(2, 10) if tenths > 10 * share] if plan.obstacles else []
        lowered = [tenths for tenths in range(9, 1, -1) if tenths < 10 * share] if plan.overfull else []
        for tenths in (*raised, *lowered):
            yield (f"rollout.server_args.{name}={tenths / 10:g}",)
    gpus = getattr(config.rollout, "gpus_per_engine", None)
    while gpus and 2 * gpus <= min(8 * place.nodes, place.engine_ranks):
        gpus *= 2
        yield (f"rollout.gpus_per_engine={gpus}",)


def _list_trainer_changes(plan: Plan) -> Iterator[tuple[str, ...]]:
    trainer = plan.config.trainer
    tokens = getattr(trainer, "microbatch_tokens", 0)
    while tokens // 2 >= MIN_TOKENS:
        tokens //= 2
        yield (f"trainer.microbatch_tokens={tokens}",)
    if getattr(trainer, "activation_checkpointing", True) is False:
        yield ("trainer.activation_checkpointing=true",)
    if getattr(trainer, "cpu_offload", True) is False and plan.device is not None:
        yield ("trainer.cpu_offload=true",)
    if "transformer" in type(trainer).model_fields and not getattr(trainer, "transformer", {}).get(
        "recompute_granularity"
    ):
        full = ("granularity='full'", "method='uniform'", "num_layers=1")
        yield tuple(f"trainer.transformer.recompute_{one}" for one in full)


def _list_costly_changes(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield settings with more GPUs, then with an adapter."""
    place = plan.config.placement
    for factor in (2, 4, 8):
        ranks = [f"placement.trainer_ranks={factor * place.trainer_ranks}"]
        if place.colocated:
            ranks.append(f"placement.engine_ranks={factor * place.engine_ranks}")
        if factor * place.trainer_ranks > 8 * place.nodes:
            ranks.append(f"placement.nodes={-(-factor * place.trainer_ranks // 8)}")
        yield tuple(ranks)
    if getattr(plan.config.trainer, "lora", True) is None:
        yield ("trainer.lora.rank=16",)
