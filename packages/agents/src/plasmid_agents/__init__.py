"""Agents that know the policy only by HTTP."""

from .workflow import Agent

__all__ = ["Agent"]
