"""Base classes of trainers, rollout engines and trackers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..protocols import Bundle, Cluster, RolloutEngine, TeacherClient, Trainer
from ..types import Role
from ..types.estimates import EstimateContext, PhaseEstimate
from .base import Component, RecipeView

if TYPE_CHECKING:
    from ..config.run import RunConfig


PlanRow = tuple[str, str, str]
"""A row of a dry run's plan: name, value, and how the value is computed."""


class Tracker(Component, slot="trackers"):
    """Sends metrics to an experiment tracker."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one batch. Called in order, from a dedicated thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuildContext:
    """Inputs for starting a trainer or an engine."""

    cluster: Cluster
    config: RunConfig
    """The whole recipe: the processes that are started with it create components of other tables (a rank of the trainer
    the algorithm, a server's client the plugins), and read deadlines and seeds."""
    run_dir: Path
    bundles: tuple[Bundle, ...]
    """Machine and GPU of each rank of this trainer or engine, in rank order."""
    threads: int = 1
    """CPU threads that each rank may use."""
    role_bundles: Mapping[Role, tuple[Bundle, ...]] = field(default_factory=dict)
    """Bundles of the models on dedicated ranks (`PlacementConfig.role_ranks`), for a trainer."""
    engine_name: str = "engine"
    """Prefix of the names of an engine's processes; distinguishes the engines of a run that has two."""
    before_loading: Callable[[], Awaitable[object]] | None = None
    """For an engine on the trainer's GPUs: waits until the trainer has loaded its models. An engine that measures the
    free GPU memory must call it first; until then it may start processes and import modules."""

    @property
    def on_gpu(self) -> bool:
        """True if the ranks compute on GPUs."""
        return any(bundle.gpu is not None for bundle in self.bundles)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """A low-rank adapter of the policy (LoRA, Hu et al. 2021): ``W + alpha / rank * B A`` in place of W."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Regular expressions for names of linear layers; empty for all of the decoder except routed experts."""

    @property
    def scale(self) -> float:
        """Factor on the product of the two matrices, ``alpha / rank``."""
        return self.alpha / self.rank


class TrainerConfig(Component, slot="trainer"):
    """Selects and configures a training backend."""

    def adapter(self) -> AdapterSpec | None:
        """Return the adapter that is trained instead of the full weights; None for full training."""
        return None

    def is_batch_invariant(self) -> bool:
        """Return True if the trainer implements ``run.deterministic``."""
        return False

    def replays_routing(self) -> bool:
        """Return True if tokens are routed to the experts that the engine chose (`Sample.experts`)."""
        return False

    def check(self, recipe: RecipeView) -> None:
        """Raise `ConfigError` or `ModelError` for models and machines that this trainer does not support.

        Called before any process starts. Reads only the model folders and does not import torch.
        """

    def unread_settings(self) -> Iterator[str]:
        """Yield errors ``<setting>: <problem>`` for settings that alter the policy and only take effect in training."""
        yield from ()

    def num_parts(self, ranks: int) -> int:
        """Return the number of parts a batch is split into: ``ranks``, or fewer if ranks share one model replica.

        Raises ValueError if the model cannot be laid out on this number of ranks.
        """
        return ranks

    def places_roles(self) -> bool:
        """Return True if the trainer supports models on dedicated ranks (`PlacementConfig.role_ranks`)."""
        return False

    def saves_without_optimizer(self) -> bool:
        """Return True if the trainer supports ``checkpoint.optimizer = false``."""
        return False

    def saved_bytes_per_weight(self, *, optimizer: bool) -> int:
        """Return the minimum number of bytes that a checkpoint takes per weight of the model; 0 if unknown.

        ``optimizer`` is `checkpoint.optimizer`. The first checkpoint is written only if the disk has room for it.
        """
        return 0

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        """Yield how a model with this ``config.json`` is split over ranks. Raises `ConfigError` if it cannot be
        split."""
        yield from ()

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        """Estimate memory and time of the phases ``idle``, ``score``, ``train`` and ``sync``, for `rl plan`.

        Returns nothing if there is no estimate. Must not import torch.
        """
        return ()

    def estimate_dedicated(self, context: EstimateContext, role: Role) -> Sequence[PhaseEstimate]:
        """Estimate the phases of a model on dedicated ranks: ``score``, and for a critic ``train``.

        In the context, `placement.trainer_ranks` is the number of these ranks, and ``models["model"]`` is the model's
        ``config.json``. Returns nothing if there is no estimate.
        """
        return ()

    @abstractmethod
    async def build(self, context: BuildContext) -> Trainer:
        """Start the backend. Import torch in here, not at the top of the plugin's module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPlan:
    """When to compare the engine with the trainer on a fixed prompt, and the tolerated difference."""

    tolerance: float
    """Maximum mean difference of log-probabilities, in nats."""
    every: int = 1
    """Interval between comparisons, in policy versions, starting with the first."""
    alone: bool = False
    """Complete the comparison before admitting other requests, so that it cannot change how they are batched."""


class TeacherConfig(Component, slot="teacher", default_kind="model"):
    """Selects the teacher, whose log-probabilities distillation learns from."""

    def model_path(self) -> str | None:
        """Return the setting ``path`` of a model that the trainer loads; None if the teacher runs elsewhere."""
        return None

    def check(self, recipe: RecipeView) -> None:
        """Raise `ConfigError` for recipes that this teacher does not support. Called before any process starts."""

    async def connect(self, config: RunConfig) -> TeacherClient | None:
        """Connect to a teacher that runs elsewhere, and check it. Called once, in the driver; None for a model.

        Gets the whole recipe, like `BuildContext`: the client reads its plugins, tokenizer and deadlines.

        Raises `EngineError` or `ConfigError`. Import the client in here, not at the top of the plugin's module.
        """
        return None


class RolloutEngineConfig(Component, slot="rollout"):
    """Selects and configures an inference engine."""

    owns_weights: ClassVar[bool] = True
    """False if an external service runs the model: `model.path` needs no weights, and the model cannot be trained."""

    reads_quantized: ClassVar[bool] = False
    """True if the engine dequantizes quantized weights, as trainers do; other engines keep them quantized, and no
    weight sync can write into them."""

    memory_share: ClassVar[str] = ""
    """Key in ``server_args`` of the fraction of GPU memory for weights and KV cache; empty if there is none."""

    def takes_ranks(self) -> bool:
        """Return True if the engine computes on ``placement.engine_ranks``, False if it runs on external machines."""
        return self.owns_weights

    def gives_kept_sets(self) -> bool:
        """Return True if completions report the tokens left by top-p, top-k and min-p.

        See `GenerateRequest.wants_kept_set`.
        """
        return False

    def gives_experts(self) -> bool:
        """Return True if completions report the chosen experts. See `GenerateRequest.routing`."""
        return False

    def is_batch_invariant(self) -> bool:
        """Return True if the engine implements ``run.deterministic``."""
        return False

    def sampling_settings(self) -> frozenset[str]:
        """Return the settings of `SamplingParams.OPTIONAL` that the engine supports."""
        return frozenset()

    def canary(self) -> CanaryPlan | None:
        """Return how to compare the engine with the trainer on a fixed prompt (`loop/canary.py`); None for never.

        Engines that do not decode with the trainer's code need this comparison.
        """
        return None

    def check(self, recipe: RecipeView) -> None:
        """Raise `ConfigError` or `ModelError` for models that this engine does not support.

        Called before any process starts, if the models are on this machine. Must not import torch.
        """

    def plan(self, model: Mapping[str, Any], ranks: int) -> Iterator[PlanRow]:
        """Yield how a model with this ``config.json`` is split over ranks. Raises `ConfigError` if it cannot be
        split."""
        yield from ()

    def estimate(self, context: EstimateContext) -> Sequence[PhaseEstimate]:
        """Estimate memory and time of the phases ``idle``, ``sample`` and ``sync``, for `rl plan`.

        Returns nothing if there is no estimate. Must not import torch.
        """
        return ()

    @abstractmethod
    async def build(self, context: BuildContext) -> RolloutEngine:
        """Start the engine. Import it in here, not at the top of the plugin's module."""
