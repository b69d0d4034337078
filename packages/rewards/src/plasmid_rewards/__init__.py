"""Rewards and filters of Plasmid."""

from .exact_match import ExactMatch
from .format import Format
from .length import Length
from .max_truncated import MaxTruncated
from .nonzero_spread import NonzeroSpread
from .number import Number, find_number
from .pattern import Regex
from .random_value import Random
from .reward_range import RewardRange

__all__ = [
    "ExactMatch",
    "Format",
    "Length",
    "MaxTruncated",
    "NonzeroSpread",
    "Number",
    "Random",
    "Regex",
    "RewardRange",
    "find_number",
]
