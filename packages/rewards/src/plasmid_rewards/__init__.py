"""Rewards and filters of Plasmid."""

from .code import Code
from .combine import Boxed, Gate, Isolated, Part, Product, Sum
from .dapo import Dapo
from .deepscaler import DeepScaler
from .distinct import Distinct
from .exact_match import ExactMatch
from .f1 import F1
from .format import Format
from .gpqa import GPQA
from .gym import ReasoningGym, ReasoningGymSource
from .instructions import IFBench, IFEval
from .length import Length
from .math_answer import Math
from .max_truncated import MaxTruncated
from .nonzero_spread import NonzeroSpread
from .number import Number, find_number
from .pattern import Regex
from .pooled import PooledReward
from .random_value import Random
from .reward_range import RewardRange
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
    "Gate",
    "IFBench",
    "IFEval",
    "Isolated",
    "Judge",
    "Length",
    "Math",
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
    "Sum",
    "find_number",
]
