"""Tools that come with Plasmid."""

from .calculator import CalculatorTool
from .function import FunctionTool
from .python import PythonTool
from .search import SearchTool

__all__ = ["CalculatorTool", "FunctionTool", "PythonTool", "SearchTool"]
