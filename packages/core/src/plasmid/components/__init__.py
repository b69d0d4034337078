"""What a plugin subclasses.

A component is a pydantic model: its fields are its settings, the docstring under a field is that setting's help.
Light components (rewards, filters, algorithms, ...) do their work themselves. Heavy ones (trainers, engines) are
settings whose ``build()`` imports and starts the real thing, so that listing plugins never imports torch.
"""

from .backends import BuildContext, CanaryPlan, PlanRow, RolloutEngineConfig, Tracker, TrainerConfig
from .base import SLOTS, Component, Settings, Slot, components_in
from .buffer_policy import BufferPolicy
from .conversion import Converter
from .interaction import Environment, Episode, Step, Tool, ToolError
from .methods import ActorCritic, Algorithm, Needs, Reduction
from .rollouts import Rollout, Workflow
from .scoring import Filter, Reward
from .sources import DataFacts, DataSource, PromptEncoder, PromptStream

__all__ = [
    "SLOTS",
    "ActorCritic",
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
    "Needs",
    "PlanRow",
    "PromptEncoder",
    "PromptStream",
    "Reduction",
    "Reward",
    "Rollout",
    "RolloutEngineConfig",
    "Settings",
    "Slot",
    "Step",
    "Tool",
    "ToolError",
    "Tracker",
    "TrainerConfig",
    "Workflow",
    "components_in",
]
