"""The workflow with tools, what reads calls and schemas, and the tools that come with Plasmid."""

from .workflow import Tools

__all__ = ["Tools"]
