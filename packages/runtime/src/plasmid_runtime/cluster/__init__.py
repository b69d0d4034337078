"""The only code that imports Ray."""

from .opening import open_cluster

__all__ = ["open_cluster"]
