"""The tasks of the package reasoning-gym: as prompts without end, and as a verifier."""

from .reward import ReasoningGym
from .source import ReasoningGymSource

__all__ = ["ReasoningGym", "ReasoningGymSource"]
