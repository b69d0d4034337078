"""The only code that imports Ray."""

from .ray_cluster import RayCluster

__all__ = ["RayCluster"]
