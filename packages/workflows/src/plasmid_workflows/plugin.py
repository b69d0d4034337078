"""Registers workflows, tools and environments."""

from __future__ import annotations

from plasmid.components import Reward, Workflow
from plasmid.components.interaction import Environment, Tool
from plasmid.plugins.hookspecs import hookimpl

from . import EnvironmentReward, EnvironmentWorkflow, FunctionWorkflow, Tools
from .environments import Calculator, Guess, Search
from .kit import CalculatorTool, FunctionTool, PythonTool, SearchTool
from .single_turn import SingleTurn


@hookimpl
def register_workflows() -> list[type[Workflow]]:
    return [EnvironmentWorkflow, FunctionWorkflow, SingleTurn, Tools]


@hookimpl
def register_tools() -> list[type[Tool]]:
    return [CalculatorTool, FunctionTool, PythonTool, SearchTool]


@hookimpl
def register_environments() -> list[type[Environment]]:
    return [Calculator, Guess, Search]


@hookimpl
def register_rewards() -> list[type[Reward]]:
    return [EnvironmentReward]
