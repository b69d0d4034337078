"""Rewards that ask a server."""

from .judge import Judge
from .remote import Remote

__all__ = ["Judge", "Remote"]
