"""Rewards and filters of Plasmid."""

from .code import Code
from .combine import Boxed, Gate, Isolated, Part, Product, Sum
from .filters import (
    FunctionFilter,
    LengthRange,
    MaxDuplicates,
    MaxTruncated,
    NonzeroSpread,
    RewardRange,
    Staleness,
)
from .gym import ReasoningGym, ReasoningGymSource
from .mathematics.dapo import Dapo
from .mathematics.deepscaler import DeepScaler
from .mathematics.math_answer import Math
from .mathematics.number import Number, find_number
from .pooled import PooledReward
from .text.distinct import Distinct
from .text.exact_match import ExactMatch
from .text.f1 import F1
from .text.format import Format
from .text.gpqa import GPQA
from .text.instructions import IFBench, IFEval
from .text.length import Length
from .text.pattern import Regex
from .text.random_value import Random
from .web import Judge, Remote

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
