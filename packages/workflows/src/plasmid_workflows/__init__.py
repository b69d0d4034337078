"""Workflows that turn a prompt into samples: several turns with tools, environments, custom functions.

Names are imported when they are first used, so that worker processes start faster.
"""

from typing import TYPE_CHECKING

from plasmid.lazy_exports import export_lazily

if TYPE_CHECKING:
    from .builtin_environments import Calculator, Guess, Search
    from .builtin_workflows import FunctionWorkflow, SingleTurn
    from .environment import EnvironmentReward, EnvironmentWorkflow
    from .tools.builtin.tools import CalculatorTool, FunctionTool, PythonTool, SearchTool
    from .tools.workflow import Tools

__all__ = [
    "Calculator",
    "CalculatorTool",
    "EnvironmentReward",
    "EnvironmentWorkflow",
    "FunctionTool",
    "FunctionWorkflow",
    "Guess",
    "PythonTool",
    "Search",
    "SearchTool",
    "SingleTurn",
    "Tools",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "builtin_environments": ("Calculator", "Guess", "Search"),
        "builtin_workflows": ("FunctionWorkflow", "SingleTurn"),
        "environment": ("EnvironmentReward", "EnvironmentWorkflow"),
        "tools.builtin.tools": ("CalculatorTool", "FunctionTool", "PythonTool", "SearchTool"),
        "tools.workflow": ("Tools",),
    },
)
