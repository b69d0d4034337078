"""Plasmid's public types, base classes and functions. Importing this imports neither torch nor ray.

Each name is imported when it is first used: processes that only need some modules of this package start faster.
"""

from typing import TYPE_CHECKING

from .lazy_exports import export_lazily

if TYPE_CHECKING:
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

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "api": ("open", "train"),
        "components": (
            "ActorCritic",
            "Algorithm",
            "BuildContext",
            "Component",
            "Converter",
            "DataSource",
            "Filter",
            "Needs",
            "RecipeView",
            "Reward",
            "Rollout",
            "RolloutEngineConfig",
            "TeacherConfig",
            "Tracker",
            "TrainerConfig",
            "Workflow",
        ),
        "components.buffer_policy": ("BufferPolicy",),
        "components.objective_inputs": ("AdvantageInputs", "LossInputs", "TokenLoss", "ValueInputs"),
        "config.load": ("load_config",),
        "config.run": ("RunConfig",),
        "errors": ("PlasmidError",),
        "plugins.hookspecs": ("hookimpl",),
        "protocols": ("EngineClient", "RolloutEngine", "RunContext", "Trainer"),
        "types": (
            "Completion",
            "GenerateRequest",
            "Prompt",
            "PromptGroup",
            "Role",
            "Sample",
            "SamplingParams",
            "Score",
            "StopReason",
            "VersionSpan",
        ),
        "types.batch": ("BatchRef", "BatchTable", "GroupRef", "Rows"),
    },
)
