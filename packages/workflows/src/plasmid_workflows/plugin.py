"""Registers workflows, tools and environments."""

from __future__ import annotations

from plasmid.components import Component
from plasmid.plugins.hookspecs import hookimpl

from . import EnvironmentReward, EnvironmentWorkflow, FunctionWorkflow, Tools
from .environments import Calculator, Guess, Search
from .single_turn import SingleTurn
from .tools.builtin import CalculatorTool, FunctionTool, PythonTool, SearchTool


@hookimpl
def register_components() -> list[type[Component]]:
    return [
        EnvironmentWorkflow,
        FunctionWorkflow,
        SingleTurn,
        Tools,
        CalculatorTool,
        FunctionTool,
        PythonTool,
        SearchTool,
        Calculator,
        Guess,
        Search,
        EnvironmentReward,
    ]
