"""Megatron's checkpoint layouts. Importing this imports neither torch nor megatron."""

from .legacy import MegatronTorch
from .torch_dist import TorchDistFolder

__all__ = ["MegatronTorch", "TorchDistFolder"]
