"""How one prompt becomes samples: several turns with tools, environments, functions of users."""

from .environment import EnvironmentReward, EnvironmentWorkflow
from .function import FunctionWorkflow
from .tools import Tools

__all__ = ["EnvironmentReward", "EnvironmentWorkflow", "FunctionWorkflow", "Tools"]
