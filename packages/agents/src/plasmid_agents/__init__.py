"""Workflows for agents that access the policy over HTTP."""

from .workflow import Agent

__all__ = ["Agent"]
