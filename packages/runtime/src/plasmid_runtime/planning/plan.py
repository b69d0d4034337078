"""Plan memory and time of a recipe, from the estimates of its trainer and engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from plasmid.config.run import RunConfig
from plasmid.types import Role
from plasmid.types.estimates import Accelerator, BatchLoad, EstimateContext, Phase, PhaseEstimate
from plasmid_models.estimates.accelerators import ACCELERATORS, DEFAULT, GIB, find_accelerator, match_accelerator
from plasmid_models.folder import read_text_config

DRIVER = Path("/proc/driver/nvidia/gpus")
MODEL = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)


def read_host_memory() -> float:
    """Return the memory of this machine, in bytes."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def read_gpu_names(driver: Path = DRIVER) -> list[str]:
    """Return the product names of this machine's GPUs, from the driver's files."""
    names = []
    for file in sorted(driver.glob("*/information")):
        try:
            names += MODEL.findall(file.read_text(errors="replace"))
        except OSError:
            continue
    return names


def choose_device(config: RunConfig, name: str | None) -> tuple[Accelerator | None, str]:
    """Return the GPU to plan for and the reason; None for a CPU. Raises `ConfigError` for unknown names."""
    if name is not None:
        return find_accelerator(name), "--gpu"
    if config.placement.device == "cpu":
        return None, 'placement.device = "cpu"'
    found = read_gpu_names()
    known = match_accelerator(found[0]) if found else None
    if known is not None:
        return known, f"this machine: {found[0]}"
    if config.placement.device == "cuda":
        return ACCELERATORS[DEFAULT], "no known GPU in this machine; --gpu selects another"
    return None, "no known GPU in this machine; --gpu plans for one"


CONTEXT = 0.6 * GIB
"""Memory of CUDA and its libraries per process, in bytes."""
RESERVE = 0.05
"""Fragmentation of a trainer's memory, as a fraction of its allocations."""
PROCESS = 0.7 * GIB
"""Memory of a process on a CPU that has loaded torch, in bytes."""
PHASES: tuple[Phase, ...] = ("sample", "score", "train", "sync")
Place = Literal["shared", "trainer", "engine", "reference", "teacher", "critic"]
ROLE_PLACES: Mapping[Role, Place] = {Role.REFERENCE: "reference", Role.TEACHER: "teacher", Role.CRITIC: "critic"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """Memory of a place in a phase: of its GPU with the highest usage, or on a CPU its process."""

    place: Place
    phase: Phase
    memory: Mapping[str, float]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.memory.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Memory and time of a recipe."""

    config: RunConfig
    device: Accelerator | None
    """None for a CPU."""
    load: BatchLoad
    trainer: Mapping[Phase, PhaseEstimate]
    """Empty if the trainer has no estimates."""
    engine: Mapping[Phase, PhaseEstimate]
    """Empty if no engine of the run computes anything, or if it has no estimates."""
    roles: Mapping[Place, Mapping[Phase, PhaseEstimate]] = field(default_factory=dict)
    """Models on dedicated ranks."""

    @cached_property
    def usages(self) -> tuple[Usage, ...]:
        """Memory usages, ordered by place, then by phase."""
        dedicated = [usage for place, part in self.roles.items() for usage in self._use_separately(place, part)]
        if self.config.placement.colocated and self.engine and self.device is not None:
            return (*self._use_together(), *dedicated)
        parts = (self._use_separately(place, part) for place, part in self._parts())
        return (*chain(*parts), *dedicated)

    @property
    def limit(self) -> float:
        """Memory of one GPU, or of this machine, in bytes."""
        return read_host_memory() if self.device is None else self.device.memory

    @property
    def overfull(self) -> tuple[Usage, ...]:
        """Usages above the limit, the largest first."""
        if self.device is None:
            together = sum(self.processes(place) * self.peak(place) for place in ("trainer", "engine", *self.roles))
            worst = [max(self.usages, key=lambda usage: usage.total)] if self.usages else []
            return tuple(worst) if together > self.limit else ()
        return tuple(sorted((u for u in self.usages if u.total > self.limit), key=lambda usage: -usage.total))

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Reasons other than memory for which the run cannot start."""
        every = (*self.trainer.values(), *self.engine.values())
        return tuple(estimate.obstacle for estimate in every if estimate.obstacle)

    @property
    def fits(self) -> bool:
        """True if the run has enough memory and no obstacles."""
        return not (self.overfull or self.obstacles)

    def processes(self, place: Place) -> int:
        """Return the number of ranks of a part."""
        counts: dict[str, int] = {"trainer": self.config.placement.trainer_ranks, "engine": self.config.engine_ranks}
        counts |= {role.value: count for role, count in self.config.placement.role_ranks.items()}
        return counts[place]

    def peak(self, place: Place) -> float:
        """Return the maximum memory of a place over all phases, in bytes; 0 without estimates."""
        return max((usage.total for usage in self.usages if usage.place == place), default=0.0)

    @property
    def seconds(self) -> Mapping[Phase, float]:
        """Estimated seconds per batch, by phase."""
        found: dict[Phase, float] = {}
        for phase in PHASES:
            parts = [part[phase].seconds for part in (self.trainer, self.engine) if phase in part]
            known = [seconds for seconds in parts if seconds is not None]
            if known:
                found[phase] = sum(known)
            dedicated = [part[phase].seconds for part in self.roles.values() if phase in part]
            for seconds in dedicated:  # they score and train at the same time as the policy
                if seconds is not None:
                    found[phase] = max(found.get(phase, 0.0), seconds)
        return found

    @property
    def batch_seconds(self) -> float | None:
        """Seconds per batch. Sampling overlaps with training if samples may be stale and GPUs are not shared."""
        seconds = self.seconds
        if "train" not in seconds or (self.config.engine_ranks and "sample" not in seconds):
            return None
        training = seconds.get("score", 0.0) + seconds["train"]
        sampling = seconds.get("sample", 0.0)
        overlaps = self.config.run.max_staleness > 0 and not self.config.placement.colocated
        sync = seconds.get("sync", 0.0) / self.config.run.sync_every
        return (max(training, sampling) if overlaps else training + sampling) + sync

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run."""
        place = self.config.placement
        slots = place.slots(trainers=place.trainer_ranks, engines=self.config.engine_ranks, evals=place.eval_ranks)
        return len(slots.nodes)

    @property
    def hours(self) -> float | None:
        """Hours for all batches, excluding start, evaluations and checkpoints."""
        return None if self.batch_seconds is None else self.batch_seconds * self.config.run.batches / 3600

    def basis(self, phase: Phase) -> str:
        """Return how the time of a phase is computed."""
        parts = [part[phase].basis for part in (self.engine, self.trainer) if phase in part]
        parts += [part[phase].basis for part in self.roles.values() if phase in part]
        return "; ".join(text for text in parts if text)

    def facts(self) -> dict[str, str]:
        """Additional facts from trainer and engine."""
        return {
            name: text for part in (*self.trainer.values(), *self.engine.values()) for name, text in part.facts.items()
        }

    def _use_separately(self, place: Place, estimates: Mapping[Phase, PhaseEstimate]) -> Iterator[Usage]:
        """Yield the usages of a part with separate GPUs or processes."""
        for phase in PHASES:
            if phase in estimates:
                yield Usage(
                    place=place,
                    phase=phase,
                    memory={**estimates[phase].memory, **self._add_overhead(place, estimates[phase])},
                )

    def _use_together(self) -> Iterator[Usage]:
        """Yield the usages of GPUs that trainer and engine use in turn."""
        for phase in PHASES:
            parts = [(name, part.get(phase, part.get("idle"))) for name, part in self._parts()]
            if not any(phase in part for _, part in self._parts()):
                continue
            memory: dict[str, float] = {}
            for name, estimate in parts:
                if estimate is not None:
                    for what, size in (*estimate.memory.items(), *self._add_overhead(name, estimate).items()):
                        memory[what] = memory.get(what, 0.0) + size
            yield Usage(place="shared", phase=phase, memory=memory)

    def _parts(self) -> Sequence[tuple[Place, Mapping[Phase, PhaseEstimate]]]:
        return (("trainer", self.trainer), ("engine", self.engine))

    def _add_overhead(self, place: Place, estimate: PhaseEstimate) -> dict[str, float]:
        if self.device is None:
            return {"Python and libraries": PROCESS}
        reserve = 0.0 if place == "engine" else RESERVE * estimate.total
        return {"CUDA and reserve": CONTEXT + reserve}


def add_critic_config(config: RunConfig, models: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add the ``config.json`` of a critic that starts as the policy."""
    if config.algorithm.needs().critic:
        models.setdefault("critic", models["model"])
    return models


def read_configs(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Read the ``config.json`` of each model that the run needs, by table. Raises `ModelError`."""
    return add_critic_config(
        config, {table: read_text_config(table, Path(path)) for table, path in config.needed_models.items()}
    )


def make_plan(
    config: RunConfig,
    models: Mapping[str, Mapping[str, Any]],
    device: Accelerator | None,
    load: BatchLoad,
) -> Plan:
    """Plan a recipe whose models have these ``config.json``, by table. Raises `ConfigError`."""
    context = EstimateContext(config=config, models=models, device=device, load=load)
    engine = config.rollout.estimate(context) if config.rollout is not None and config.engine_ranks else ()
    dedicated = {ROLE_PLACES[role] for role in config.placement.role_ranks}
    shared = replace(context, models={table: model for table, model in models.items() if table not in dedicated})
    return Plan(
        config=config,
        device=device,
        load=load,
        trainer={estimate.phase: estimate for estimate in config.trainer.estimate(shared)},
        engine={estimate.phase: estimate for estimate in engine},
        roles=dict(_estimate_roles(context)),
    )


def _estimate_roles(context: EstimateContext) -> Iterator[tuple[Place, dict[Phase, PhaseEstimate]]]:
    """Yield the estimates of the models on dedicated ranks."""
    config, models = context.config, context.models
    for role, count in config.placement.role_ranks.items():
        name = ROLE_PLACES[role]
        place = config.placement.model_copy(update={"trainer_ranks": count})
        own = replace(
            context,
            config=config.model_copy(update={"placement": place}),
            models={"model": models.get(name, models["model"])},
        )
        work = {"score": f"forward passes of dedicated {name}", "train": f"steps of dedicated {name}"}
        estimates = config.trainer.estimate_dedicated(own, role)
        yield name, {part.phase: replace(part, basis=work.get(part.phase, "")) for part in estimates}
