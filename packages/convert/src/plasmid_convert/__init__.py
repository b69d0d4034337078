"""Checkpoint layouts and conversion between them. Importing this does not import torch."""

from .checkpoint import Comparison, compare, convert, verify_sha256
from .dcp import DCP
from .gguf.converter import GGUF
from .hf import HF
from .parts import Progress

__all__ = ["DCP", "GGUF", "HF", "Comparison", "Progress", "compare", "convert", "verify_sha256"]
