"""Workflows that turn a prompt into samples: several turns with tools, environments, custom functions."""

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
