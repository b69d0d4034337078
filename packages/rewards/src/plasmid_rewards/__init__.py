"""Rewards and filters of Plasmid."""

from .code import Code
from .combine import Boxed, Gate, Isolated, Part, Product, Sum
from .dapo import Dapo
from .deepscaler import DeepScaler
from .distinct import Distinct
from .exact_match import ExactMatch
from .f1 import F1
from .filters import (
    FunctionFilter,
    LengthRange,
    MaxDuplicates,
    MaxTruncated,
    NonzeroSpread,
    RewardRange,
    Staleness,
)
from .format import Format
from .gpqa import GPQA
from .gym import ReasoningGym, ReasoningGymSource
from .instructions import IFBench, IFEval
from .length import Length
from .math_answer import Math
from .number import Number, find_number
from .pattern import Regex
from .pooled import PooledReward
from .random_value import Random
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
