"""Plasmid's public types, base classes and functions. Importing this imports neither torch nor ray."""

from .api import open, train
from .components import (
    ActorCritic,
    Algorithm,
    BuildContext,
    Component,
    Converter,
    DataSource,
    Filter,
    Needs,
    RecipeView,
    Reward,
    Rollout,
    RolloutEngineConfig,
    TeacherConfig,
    Tracker,
    TrainerConfig,
    Workflow,
)
from .components.buffer_policy import BufferPolicy
from .components.objective_inputs import AdvantageInputs, LossInputs, TokenLoss, ValueInputs
from .config.load import load_config
from .config.run import RunConfig
from .errors import PlasmidError
from .plugins.hookspecs import hookimpl
from .protocols import EngineClient, RolloutEngine, RunContext, Trainer
from .types import (
    Completion,
    GenerateRequest,
    Prompt,
    PromptGroup,
    Role,
    Sample,
    SamplingParams,
    Score,
    StopReason,
    VersionSpan,
)
from .types.batch import BatchRef, BatchTable, GroupRef, Rows

__all__ = [
    "ActorCritic",
    "AdvantageInputs",
    "Algorithm",
    "BatchRef",
    "BatchTable",
    "BufferPolicy",
    "BuildContext",
    "Completion",
    "Component",
    "Converter",
    "DataSource",
    "EngineClient",
    "Filter",
    "GenerateRequest",
    "GroupRef",
    "LossInputs",
    "Needs",
    "PlasmidError",
    "Prompt",
    "PromptGroup",
    "RecipeView",
    "Reward",
    "Role",
    "Rollout",
    "RolloutEngine",
    "RolloutEngineConfig",
    "Rows",
    "RunConfig",
    "RunContext",
    "Sample",
    "SamplingParams",
    "Score",
    "StopReason",
    "TeacherConfig",
    "TokenLoss",
    "Tracker",
    "Trainer",
    "TrainerConfig",
    "ValueInputs",
    "VersionSpan",
    "Workflow",
    "hookimpl",
    "load_config",
    "open",
    "train",
]
