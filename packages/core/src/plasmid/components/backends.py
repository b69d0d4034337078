"""What a plugin subclasses to bring a trainer, an engine or a tracker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..protocols import Bundle, Cluster, RolloutEngine, Trainer
from .base import Component
from .methods import Algorithm

if TYPE_CHECKING:
    from ..config.run import RunConfig


PlanRow = tuple[str, str, str]
"""A line of a dry run's plan: what, how many, how it is worked out."""


class Tracker(Component, slot="trackers"):
    """Takes metrics to where people look at them."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one batch. Called from a thread of its own, in order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildContext:
    """What trainers and engines are started with."""

    cluster: Cluster
    config: RunConfig
    run_dir: Path
    bundles: tuple[Bundle, ...]
    """Machine and GPU of each rank of this part, in rank order."""
    threads: int = 1
    """CPU threads that each rank may use."""
    engine_name: str = "engine"
    """What the processes of an engine are called, before their number: a run may have two engines."""

    @property
    def on_gpu(self) -> bool:
        """True if the ranks compute on GPUs."""
        return any(bundle.gpu is not None for bundle in self.bundles)


class TrainerConfig(Component, slot="trainer"):
    """Selects and configures a training backend."""

    def mistakes(self, algorithm: Algorithm) -> Iterator[str]:
        """What these settings say that has no effect with the algorithm, one ``trainer.<key>: ...`` each."""
        yield from ()

    def check(self, config: RunConfig) -> None:
        """Raise `ConfigError` or `ModelError` for models and machines that it cannot train on.

        Called before any process is started: by the folders alone, without importing torch.
        """

    def num_parts(self, ranks: int) -> int:
        """Parts that this many processes deal a batch out to: as many, unless several hold one model together.

        Raises ValueError if so many cannot be laid out.
        """
        return ranks

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        """How a model with this ``config.json`` lies on so many ranks. Raises `ConfigError` if it cannot."""
        yield from ()

    @abstractmethod
    async def build(self, context: BuildContext) -> Trainer:
        """Start the backend. Import torch in here, not at the top of the plugin's module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """When the engine is compared with the trainer on a fixed prompt, and what difference is allowed."""

    tolerance: float
    """Maximum mean difference of log-probabilities, in nats."""
    every: int = 1
    """The versions that are compared: those that this divides, the first included."""
    alone: bool = False
    """Wait for the answer before other requests are let in: which of them run together must not depend on it."""


class RolloutEngineConfig(Component, slot="rollout"):
    """Selects and configures an inference engine."""

    owns_weights: ClassVar[bool] = True
    """False if somebody else serves the model: `model.path` needs no weights, and nothing can be trained with it."""

    def takes_ranks(self) -> bool:
        """True if it computes on ``placement.engine_ranks``; False if machines of somebody else do it."""
        return self.owns_weights

    def gives_kept_sets(self) -> bool:
        """True if completions say what top-p, top-k and min-p left to draw from (`GenerateRequest.wants_kept_set`)."""
        return False

    def mistakes(self, config: RunConfig) -> Iterator[str]:
        """What these settings say that does not fit the rest of the recipe, one ``<table>.<key>: ...`` each."""
        yield from ()

    def canary(self) -> CanaryPlan | None:
        """How the engine is compared with the trainer on a fixed prompt (`run/loop/canary.py`); None for never.

        An engine needs it whose decoding is not the trainer's code.
        """
        return None

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        """How a model with this ``config.json`` lies on so many ranks. Raises `ConfigError` if it cannot."""
        yield from ()

    @abstractmethod
    async def build(self, context: BuildContext) -> RolloutEngine:
        """Start the engine. Import it in here, not at the top of the plugin's module."""
