"""Base classes of plugin components.

A component is a pydantic model: its fields are settings, and the docstring under a field is the help text of that
setting. Light components (rewards, filters, algorithms, ...) implement their behavior directly. Heavy ones (trainers,
engines) only hold settings; their ``build()`` imports and starts the backend, so listing plugins never imports torch.
"""

from ..settings.base import Settings
from ..types.families import ModelFamily
from .backends import (
    AdapterSpec,
    BuildContext,
    CanaryPlan,
    PlanRow,
    RolloutEngineConfig,
    TeacherConfig,
    Tracker,
    TrainerConfig,
)
from .base import SLOTS, Component, RecipeView, Slot, iterate_components, kind_of
from .buffer_policy import BufferPolicy
from .conversion import Converter, OpenCheckpoint, PartWriter, TensorInfo
from .interaction import Environment, Episode, Step, Tool, ToolError, ToolServer
from .methods import ActorCritic, Algorithm, Needs, Reduction
from .rollouts import Rollout, Workflow
from .scoring import Filter, Reward
from .sources import DataFacts, DataSource, PromptEncoder, PromptStream

__all__ = [
    "SLOTS",
    "ActorCritic",
    "AdapterSpec",
    "Algorithm",
    "BufferPolicy",
    "BuildContext",
    "CanaryPlan",
    "Component",
    "Converter",
    "DataFacts",
    "DataSource",
    "Environment",
    "Episode",
    "Filter",
    "ModelFamily",
    "Needs",
    "OpenCheckpoint",
    "PartWriter",
    "PlanRow",
    "PromptEncoder",
    "PromptStream",
    "RecipeView",
    "Reduction",
    "Reward",
    "Rollout",
    "RolloutEngineConfig",
    "Settings",
    "Slot",
    "Step",
    "TeacherConfig",
    "TensorInfo",
    "Tool",
    "ToolError",
    "ToolServer",
    "Tracker",
    "TrainerConfig",
    "Workflow",
    "iterate_components",
    "kind_of",
]
