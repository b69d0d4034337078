"""Rewards and filters of Plasmid.

Names are imported when they are first used, so that worker processes start faster.
"""

from typing import TYPE_CHECKING

from plasmid.lazy_exports import export_lazily

if TYPE_CHECKING:
    from .code.reward import Code
    from .combine import Boxed, Gate, Isolated, Part, Product, Sum
    from .filters import FunctionFilter, LengthRange, MaxDuplicates, MaxTruncated, NonzeroSpread, RewardRange, Staleness
    from .gym.reward import ReasoningGym
    from .gym.source import ReasoningGymSource
    from .mathematics.dapo import Dapo
    from .mathematics.deepscaler import DeepScaler
    from .mathematics.math_answer import Math
    from .mathematics.number import Number, find_number
    from .pooled import PooledReward
    from .text.gpqa import GPQA
    from .text.instructions import IFBench, IFEval
    from .text.rules import F1, Distinct, ExactMatch, Format, Length, Random, Regex
    from .web.judge import Judge
    from .web.remote import Remote

__all__ = [
    "F1",
    "GPQA",
    "Boxed",
    "Code",
    "Dapo",
    "DeepScaler",
    "Distinct",
    "ExactMatch",
    "Format",
    "FunctionFilter",
    "Gate",
    "IFBench",
    "IFEval",
    "Isolated",
    "Judge",
    "Length",
    "LengthRange",
    "Math",
    "MaxDuplicates",
    "MaxTruncated",
    "NonzeroSpread",
    "Number",
    "Part",
    "PooledReward",
    "Product",
    "Random",
    "ReasoningGym",
    "ReasoningGymSource",
    "Regex",
    "Remote",
    "RewardRange",
    "Staleness",
    "Sum",
    "find_number",
]

__getattr__, __dir__ = export_lazily(
    __name__,
    {
        "code.reward": ("Code",),
        "combine": ("Boxed", "Gate", "Isolated", "Part", "Product", "Sum"),
        "filters": (
            "FunctionFilter",
            "LengthRange",
            "MaxDuplicates",
            "MaxTruncated",
            "NonzeroSpread",
            "RewardRange",
            "Staleness",
        ),
        "gym.reward": ("ReasoningGym",),
        "gym.source": ("ReasoningGymSource",),
        "mathematics.dapo": ("Dapo",),
        "mathematics.deepscaler": ("DeepScaler",),
        "mathematics.math_answer": ("Math",),
        "mathematics.number": ("Number", "find_number"),
        "pooled": ("PooledReward",),
        "text.gpqa": ("GPQA",),
        "text.instructions": ("IFBench", "IFEval"),
        "text.rules": ("F1", "Distinct", "ExactMatch", "Format", "Length", "Random", "Regex"),
        "web.judge": ("Judge",),
        "web.remote": ("Remote",),
    },
)
