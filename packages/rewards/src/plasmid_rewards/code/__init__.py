"""The reward that runs programs."""

from .reward import Code

__all__ = ["Code"]
