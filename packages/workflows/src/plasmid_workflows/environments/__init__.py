"""Environments that come with Plasmid."""

from .calculator import Calculator
from .guess import Guess
from .search import Search

__all__ = ["Calculator", "Guess", "Search"]
