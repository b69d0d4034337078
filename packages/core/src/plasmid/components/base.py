"""The base class of components, and the registry of slots."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..errors import PluginError
from ..protocols import RunContext
from ..settings.base import Settings
from ..types import SamplingParams

if TYPE_CHECKING:
    from ..config.placement import PlacementConfig
    from ..config.run import ModelConfig
    from .methods import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeView:
    """Read-only view of the recipe, passed to ``find_errors`` and ``check`` of a component."""

    key: str
    """Key of the component itself: ``rollout``, ``filters.0``."""
    needs: Needs
    """Requirements of the algorithm."""
    model: ModelConfig
    """The policy: `model.path`, its tokenizer and chat template."""
    needed_models: Mapping[str, str]
    """`RunConfig.needed_models`."""
    engine_kind: str
    """Kind of the rollout engine; empty without one."""
    engine_reads_quantized: bool
    """`RolloutEngineConfig.reads_quantized`; True without an engine."""
    replays_kept_sets: bool
    """`RunConfig.replays_kept_sets`."""
    trainer_kind: str
    trainer_dtype: str
    """`trainer.dtype`; ``auto`` if the trainer has no such setting."""
    trains_adapter: bool
    """Whether the trainer trains an adapter instead of the policy's weights."""
    batches: int
    """`run.batches`."""
    max_staleness: int
    """`run.max_staleness`."""
    deterministic: bool
    """`run.deterministic`."""
    placement: PlacementConfig
    samplings: Mapping[str, SamplingParams]
    """All sampling settings of training by recipe key: ``sampling``, ``profiles.<name>.sampling``."""
    eval_samplings: Mapping[str, SamplingParams] = field(default_factory=dict)
    """Sampling settings of evaluation sets that define their own, by recipe key, such as ``eval.0.sampling``."""

    @property
    def place(self) -> str:
        raise PluginError("find_errors: RecipeView.place is now RecipeView.key; rename it")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for components: a table of the recipe, a list of tables, or a field of another component."""

    name: str
    """Key of the recipe."""
    base: type[Component]
    """Base class of its components."""
    default_kind: str | None
    """Kind of a table without ``kind``; None if ``kind`` is required."""


SLOTS: dict[str, Slot] = {}
"""Every slot by its name; filled as the base classes are defined."""


class Component(Settings, ABC):
    """Base class of all components. Declare ``kind: Literal["name"] = "name"`` to name a component in recipes.

    The base class of a new type of component declares its slot: ``class Reward(Component, slot="rewards")``. Slots are
    not registered in any other way.
    """

    def __init_subclass__(cls, *, slot: str | None = None, default_kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if slot is not None:
            SLOTS[slot] = Slot(name=slot, base=cls, default_kind=default_kind)

    def packages(self) -> Mapping[str, str]:
        """Return the optional packages that these settings require: module name -> requirement for pip."""
        return {}

    def lacks(self) -> Iterator[str]:
        """Yield a line ``<key>: ...`` for each requirement that this machine lacks. Called before a run starts."""
        for name, install in self.packages().items():
            if not _is_installed(name):
                yield f"kind: {kind_of(self)!r} needs the package {name}; pip install '{install}'"

    async def open(self, context: RunContext) -> None:
        """Acquire resources, and keep them in private attributes. Called once before first use in each process."""

    async def close(self) -> None:
        """Release resources. Called once after last use."""

    def state(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint stores for `restore`, as JSON types.

        Called on trackers and buffer policies in the driver, and on rewards, filters and workflows in each worker
        process. Algorithms run on every rank and have no saved state. Data sources save theirs in a `PromptStream`.
        """
        return {}

    def merge(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Merge states of several worker processes, for a run that resumes with fewer of them.

        Returns the first by default; override it to add up counts or to merge caches.
        """
        return states[0]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Called after `open`."""


def kind_of(component: Component) -> str:
    """Return the name of a component in recipes."""
    return str(type(component).model_fields["kind"].default)


def iterate_components(settings: BaseModel, key: str = "") -> Iterator[tuple[str, Component]]:
    """Yield every component within the settings, including the root, with its recipe key: ``rewards.0.reward``."""
    if isinstance(settings, Component):
        yield key, settings
    for name in type(settings).model_fields:
        yield from _within(getattr(settings, name), f"{key}.{name}" if key else name)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # the parent package is missing; the module has no spec
        return False


def _within(value: Any, key: str) -> Iterator[tuple[str, Component]]:
    if isinstance(value, BaseModel):
        yield from iterate_components(value, key)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _within(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _within(item, f"{key}.{index}")
