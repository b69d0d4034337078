"""Which prompt groups are trained on."""

from .function import FunctionFilter
from .length_range import LengthRange
from .max_duplicates import MaxDuplicates
from .max_truncated import MaxTruncated
from .nonzero_spread import NonzeroSpread
from .reward_range import RewardRange
from .staleness import Staleness

__all__ = [
    "FunctionFilter",
    "LengthRange",
    "MaxDuplicates",
    "MaxTruncated",
    "NonzeroSpread",
    "RewardRange",
    "Staleness",
]
